#!/bin/sh
exec env SGLANG_SIMULATE_ACC_LEN=2.95 /tmp/sglang-python -m sglang.launch_server \
    --model-path /tmp/models/qwen27b \
    --attention-backend triton \
    --cuda-graph-backend-prefill disabled \
    --grammar-backend none \
    --load-format dummy \
    --mem-fraction-static 0.4 \
    --speculative-algorithm NEXTN \
    --speculative-eagle-topk 1 \
    --speculative-num-draft-tokens 4 \
    --speculative-num-steps 3 \
    --host 127.0.0.1 \
    --port 38293 \
    --served-model-name trial-2-c7c67aac0b43 \
    --enable-metrics
