#!/bin/sh
exec env SGLANG_SIMULATE_ACC_LEN=2.95 /tmp/sglang-python -m sglang.launch_server \
    --model-path /tmp/models/qwen27b \
    --attention-backend triton \
    --cuda-graph-backend-prefill disabled \
    --grammar-backend none \
    --load-format dummy \
    --mamba-ssm-dtype bfloat16 \
    --mem-fraction-static 0.8 \
    --speculative-algorithm NEXTN \
    --speculative-eagle-topk 1 \
    --speculative-num-draft-tokens 4 \
    --speculative-num-steps 3 \
    --host 127.0.0.1 \
    --port 34717 \
    --served-model-name trial-1-c73ba9af129b \
    --enable-metrics
