#!/bin/sh
exec /tmp/sglang-python -m sglang.launch_server \
    --model-path /tmp/models/qwen27b \
    --attention-backend triton \
    --cuda-graph-backend-prefill disabled \
    --grammar-backend none \
    --load-format dummy \
    --host 127.0.0.1 \
    --port 41005 \
    --served-model-name trial-6-0ad608e78263 \
    --enable-metrics
