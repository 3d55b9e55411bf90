#!/bin/sh
exec /tmp/sglang-python -m sglang.launch_server \
    --model-path /tmp/models/qwen27b \
    --attention-backend triton \
    --cuda-graph-backend-prefill disabled \
    --disable-radix-cache \
    --grammar-backend none \
    --load-format dummy \
    --mamba-ssm-dtype bfloat16 \
    --max-running-requests 72 \
    --mem-fraction-static 0.86 \
    --schedule-conservativeness 0.6 \
    --host 127.0.0.1 \
    --port 38893 \
    --served-model-name trial-7-37705fdcd337 \
    --enable-metrics
