#!/bin/sh
exec /tmp/sglang-python -m sglang.launch_server \
    --model-path /tmp/models/qwen27b \
    --attention-backend triton \
    --chunked-prefill-size 4096 \
    --cuda-graph-backend-prefill disabled \
    --cuda-graph-max-bs-decode 128 \
    --grammar-backend none \
    --load-format dummy \
    --mamba-ssm-dtype bfloat16 \
    --max-mamba-cache-size 192 \
    --max-running-requests 56 \
    --mem-fraction-static 0.94 \
    --schedule-conservativeness 0.6 \
    --schedule-policy lpm \
    --host 127.0.0.1 \
    --port 45437 \
    --served-model-name trial-5-b7786dd688ca \
    --enable-metrics
