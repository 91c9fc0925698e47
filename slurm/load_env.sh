# Sources the environment of the site (modules, conda, exports): slurm/env.sh if it exists, or the file that env= names.
# See slurm/env.sh.example. slurm/submit.py runs this before it queues anything; the job scripts run it again on their
# nodes. If a command outside of conditions and functions fails, or the last command does, the shell prints an error and
# ends with code 2.
env_file=${env_file:-slurm/env.sh}
if [ -f "$env_file" ]; then
  env_root=$PWD
  trap 'env_code=$? env_line=$LINENO env_at=${BASH_SOURCE[0]}; trap - ERR EXIT
    case $env_at in
      */load_env.sh) echo "error: $env_file ended with code $env_code" >&2 ;;
      *) echo "error: $env_at, line $env_line: \`$(sed -n "${env_line}{s/^ *//;p}" "$env_at")\` ended with code $env_code" >&2 ;;
    esac
    exit 2' ERR
  trap 'env_code=$?; trap - ERR EXIT; echo "error: $env_file left the shell (exit $env_code)" >&2; exit 2' EXIT
  set +u  # conda and many module files read unset variables
  . "$env_file"
  trap - ERR EXIT
  set -u +e +o pipefail
  cd "$env_root"
fi
python=${SSSCALE_PYTHON:-.venv/bin/python}
