#!/bin/sh
exec /tmp/sglang-python -m sglang.launch_server \
    --model-path /tmp/models/qwen27b \
    --attention-backend triton \
    --cuda-graph-backend-prefill disabled \
    --grammar-backend none \
    --load-format dummy \
    --host 127.0.0.1 \
    --port 35685 \
    --served-model-name trial-0-70739807bb36 \
    --enable-metrics
