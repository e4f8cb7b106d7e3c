#!/bin/bash
# Training on a Cloud TPU pod slice: one process on each of its machines.
#
# Needs: gcloud, logged in, with the TPU API enabled; a bucket in the region of the slice that the
# slice's service account may write. Run it from the top of this repository.
#
# Change, here or in the environment:
#   TPU, ZONE                      the name of the slice, and its zone
#   ACCELERATOR, RUNTIME           its type (v5litepod-16, v6e-16, ...) and its software version
#   WORKDIR                        gs://BUCKET/..., the same on all machines
#   RUN                            the experiment and its options
#   RUNTIME_PYTHON                 Python 3.11 or newer; Ubuntu 22.04 comes with 3.10, so `install`
#                                  installs this one
#   SPOT=1                         spot capacity: cheaper, may be preempted
#   MAX_RESTARTS                   how often a failed training is restarted
#
# Submit: launch/tpu_pod.sh create && launch/tpu_pod.sh install && launch/tpu_pod.sh train
# Watch:  launch/tpu_pod.sh logs
# Stop:   launch/tpu_pod.sh stop      (saves first; `train` resumes)
# End:    launch/tpu_pod.sh delete    (a slice is billed until it is deleted)
#
# `create` requests a queued resource, with SPOT=1 on spot capacity. It stays queued until capacity
# is available: gcloud compute tpus queued-resources describe TPU. A preempted slice and its
# machines are lost; the checkpoints are in the bucket. Machines that receive SIGTERM first save
# and exit with 75. In either case: `delete`, then `create`, `install` and `train` again.
#
# What happens by exit code, on each machine: 0, 2, 3, 4 and 75 end it; after any other it is
# restarted, at most MAX_RESTARTS times. All machines end together, so they also restart together.
set -euo pipefail

TPU=${TPU:-digits}
ZONE=${ZONE:-us-west4-a}
ACCELERATOR=${ACCELERATOR:-v5litepod-16}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
RUNTIME_PYTHON=${RUNTIME_PYTHON:-python3.11}
WORKDIR=${WORKDIR:-gs://BUCKET/runs/digits}
MAX_RESTARTS=${MAX_RESTARTS:-10}
SPOT=${SPOT:-}
RUN=(
  -m spmdtrain.run
  --config experiments/digits_mlp.py
  --workdir "$WORKDIR"
  --cluster auto
  --init-timeout 600
)

everywhere() { # runs a command on all machines of the slice
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

case ${1:-} in
  create)
    gcloud compute tpus queued-resources create "$TPU" --node-id="$TPU" --zone="$ZONE" \
      --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME" ${SPOT:+--spot}
    ;;
  install)
    # Includes the token by which the processes recognize each other, in a file of mode 0600.
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$folder/job_token")
    archive=$folder/spmdtrain.tar.gz
    (umask 077; tar -czf "$archive" pyproject.toml README.md LICENSE spmdtrain experiments \
      -C "$folder" job_token)
    gcloud compute tpus tpu-vm scp "$archive" "$TPU:spmdtrain.tar.gz" --zone="$ZONE" --worker=all
    everywhere "set -e
      command -v $RUNTIME_PYTHON || {
        sudo apt-get update
        sudo apt-get install --yes $RUNTIME_PYTHON $RUNTIME_PYTHON-venv
      }
      rm -rf spmdtrain && mkdir spmdtrain && cd spmdtrain && tar -xzf ../spmdtrain.tar.gz
      rm ../spmdtrain.tar.gz
      $RUNTIME_PYTHON -m venv .venv
      .venv/bin/pip install --quiet '.[tpu,gcs,examples]'"
    ;;
  train)
    if [[ $WORKDIR == gs://BUCKET/* ]]; then
      echo "set WORKDIR: a folder in one of your buckets, gs://..." >&2
      exit 2
    fi
    # Detached: it continues after the connection closes. `train.log` is on each machine.
    everywhere "cd spmdtrain && SPMDTRAIN_JOB_TOKEN_FILE=job_token nohup setsid bash -c '
      for restart in \$(seq 0 $MAX_RESTARTS); do
        .venv/bin/python -u $(printf '%q ' "${RUN[@]}")
        code=\$?
        echo \"exit code \$code\"
        case \$code in 0 | 2 | 3 | 4 | 75) exit \$code ;; esac
        sleep 10
      done' >>train.log 2>&1 </dev/null &"
    ;;
  logs)
    gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=0 \
      --command="tail -n 50 -f spmdtrain/train.log"
    ;;
  stop)
    # Sent to the training processes, not to the shell that restarts them: all save and exit with 75.
    everywhere "pkill -TERM -f '^[^ ]*python -u -m spmdtrain.run'"
    ;;
  delete)
    gcloud compute tpus queued-resources delete "$TPU" --zone="$ZONE" --force
    ;;
  *)
    echo "usage: launch/tpu_pod.sh create|install|train|logs|stop|delete" >&2
    exit 2
    ;;
esac
