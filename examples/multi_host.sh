#!/usr/bin/env bash
# A program on several hosts, by torch's own launcher. Run the same line on every one of them:
#
#     examples/multi_host.sh FIRST_HOST NUM_HOSTS PROGRAM [ARGUMENTS...]
#     examples/multi_host.sh node-a 2 examples/with_crossbow.py
#     examples/multi_host.sh node-a 2 -m crossbow train resnet8-cifar10 --learners 8
#
# FIRST_HOST is where the ranks find each other, at port PORT. RANKS says how many of them a host
# runs: one a core, or one a GPU.
set -euo pipefail
(($# >= 3)) || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '/^set/d' >&2; exit 2; }
first_host=$1 num_hosts=$2
shift 2
exec torchrun \
    --nnodes "$num_hosts" \
    --nproc-per-node "${RANKS:-$(nproc)}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first_host:${PORT:-29400}" \
    --rdzv-id "${JOB:-crossbow}" \
    "$@"
