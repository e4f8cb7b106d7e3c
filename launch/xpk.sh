#!/bin/bash
# Training on TPU slices of a GKE cluster, as an XPK workload: one process on each of their machines.
#
# Needs: xpk 1.16 or newer, logged in (gcloud), with a cluster; an image of launch/Dockerfile with
# the extras tpu,gcs,examples that the cluster can pull; a bucket in the region of the cluster that
# its nodes may write. Run it from the top of this repository.
#
# Change, here or in the environment:
#   WORKLOAD, CLUSTER, ZONE, PROJECT   the name of the job, and where its cluster is
#   TPU_TYPE, SLICES                   the type of a slice (v5litepod-16, v6e-16, ...), and how many
#   IMAGE                              registry.example/spmdtrain:1
#   WORKDIR                            gs://BUCKET/..., the same on all machines
#   COMMAND                            the experiment and its options
#   SPMDTRAIN_JOB_TOKEN                the token by which the processes recognize each other: a new
#                                      one for each job, unless the environment has one. It is in the
#                                      JobSet: those who may read JobSets of the namespace can read it
#   MAX_RESTARTS                       how often a failed training is restarted
#
# Submit: launch/xpk.sh create
# Watch:  launch/xpk.sh list; kubectl logs --follow NAME-OF-THE-POD
# Stop:   launch/xpk.sh delete    (saves first; `create` resumes)
#
# What happens by exit code, by the rules that xpk writes into the JobSet:
#   0               done
#   2, 3, 4         wrong usage, not finite, faulty device: the job fails, without a retry
#   75, anything else   all machines restart, at most MAX_RESTARTS times; 75 is counted, too
set -euo pipefail

WORKLOAD=${WORKLOAD:-digits}
CLUSTER=${CLUSTER:-training}
ZONE=${ZONE:-us-west4-a}
PROJECT=${PROJECT:-}
TPU_TYPE=${TPU_TYPE:-v5litepod-16}
SLICES=${SLICES:-1}
IMAGE=${IMAGE:-registry.example/spmdtrain:1}
WORKDIR=${WORKDIR:-gs://BUCKET/runs/digits}
MAX_RESTARTS=${MAX_RESTARTS:-10}
COMMAND=(
  python -u -m spmdtrain.run
  --config experiments/digits_mlp.py
  --workdir "$WORKDIR"
  --cluster auto
  --init-timeout 600
)
where=(--cluster "$CLUSTER" --zone "$ZONE" ${PROJECT:+--project "$PROJECT"})

case ${1:-} in
  create)
    if [[ $WORKDIR == gs://BUCKET/* ]]; then
      echo "set WORKDIR: a folder in one of your buckets, gs://..." >&2
      exit 2
    fi
    # xpk takes the value of a variable that a file names from the environment: the token is in no
    # command line.
    if [[ -z ${SPMDTRAIN_JOB_TOKEN:-} ]]; then
      SPMDTRAIN_JOB_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    fi
    export SPMDTRAIN_JOB_TOKEN
    variables=$(mktemp)
    trap 'rm -f "$variables"' EXIT
    echo SPMDTRAIN_JOB_TOKEN >"$variables"
    # `exec`, so that SIGTERM reaches Python. xpk itself restarts after 42 and 127 to 255 only.
    xpk workload create --workload "$WORKLOAD" "${where[@]}" --tpu-type "$TPU_TYPE" \
      --num-slices "$SLICES" --docker-image "$IMAGE" --env-file "$variables" \
      --max-restarts "$MAX_RESTARTS" --restart-on-exit-codes 1,5-41,43-126 \
      --termination-grace-period-seconds 180 --command "exec$(printf ' %q' "${COMMAND[@]}")"
    ;;
  list)
    xpk workload list "${where[@]}"
    ;;
  delete)
    xpk workload delete --workload "$WORKLOAD" "${where[@]}"
    ;;
  *)
    echo "usage: launch/xpk.sh create|list|delete" >&2
    exit 2
    ;;
esac
