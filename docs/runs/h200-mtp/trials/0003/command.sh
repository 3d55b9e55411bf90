#!/bin/sh
exec /tmp/sglang-python -m sglang.launch_server \
    --model-path /tmp/models/qwen27b \
    --attention-backend triton \
    --cuda-graph-backend-prefill disabled \
    --grammar-backend none \
    --load-format dummy \
    --mamba-ssm-dtype bfloat16 \
    --max-running-requests 64 \
    --mem-fraction-static 0.8 \
    --host 127.0.0.1 \
    --port 41389 \
    --served-model-name trial-3-e9582a722d29 \
    --enable-metrics
