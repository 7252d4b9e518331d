#!/usr/bin/env bash
# Prints the path of a Python that can run this checkout: SGLang, this project, its test tools.
# What is missing is set up first, with progress on stderr. A second call takes a second.
#
#   .venv         is used if it is there, and made otherwise: with SGLang from PyPI, or, where the
#                 active `python3` has a supported SGLang already, as a thin layer on top of it.
#   GLM53_PYTHON  names a Python whose environment has SGLang: a thin layer (.venv-layer) is put
#                 on top of it. The environment itself is never changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DEFAULT_SGLANG=0.5.23
SUPPORTED='0\.5\.2[23]'

say() { echo "[setup] $*" >&2; }
die() { echo "[setup] error: $*" >&2; exit 1; }

# The version of SGLang that a Python has, or nothing.
sglang_of() {
  "$1" -c 'import importlib.metadata as m; print(m.version("sglang"))' 2>/dev/null || true
}

supported() { [[ "$1" =~ ^${SUPPORTED}$ ]]; }

# A Python new enough to make an environment with.
find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.10 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.10 or newer found; install python3.11"
}

make_venv() { # python folder options...
  local python=$1 folder=$2
  shift 2
  rm -rf "$folder"
  "$python" -m venv "$@" "$folder" >&2 \
    || die "cannot make $folder with $python; install its venv module (Debian: python3-venv)"
}

# A venv whose packages are those of another environment, and ours on top.
make_layer() { # base-python folder
  local base=$1 folder=$2 places site
  say "putting $folder on top of $base (SGLang $(sglang_of "$base"))"
  make_venv "$base" "$folder" --without-pip
  places=$("$base" -c 'import os, sys
print("\n".join(dict.fromkeys(p for p in sys.path if p.endswith("-packages") and os.path.isdir(p))))')
  "$base" -m pip --version >/dev/null 2>&1 || die "$base has no pip; run $base -m ensurepip"
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # The base may have this package itself: this checkout comes first.
  echo "$places" > "$site/base.pth"
  ln -s "$PWD/sglang_glm53" "$site/sglang_glm53"
  # The base's own `sglang` would run in the base.
  cat > "$folder/bin/sglang" <<SCRIPT
#!$PWD/$folder/bin/python
import sys
from sglang.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
SCRIPT
  chmod +x "$folder/bin/sglang"
  echo "$base" > "$folder/.base"
}

# Without byte code first: pip writes it on one core, and it is 35,000 files.
install_sglang() { # python
  "$1" -m pip install --disable-pip-version-check --no-compile "sglang==$DEFAULT_SGLANG" >&2 \
    || die "pip could not install sglang==$DEFAULT_SGLANG; its message is above"
  say "compiling Python modules on all cores"
  # Some packages carry files that are no Python of this version.
  "$1" -m compileall -q -j 0 "$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    >/dev/null 2>&1 || true
}

install_project() { # python
  local isolation=--no-build-isolation
  "$1" -c 'import setuptools as s, sys; sys.exit(int(s.__version__.split(".")[0]) < 77)' \
    2>/dev/null || isolation=
  say "installing this checkout and its test tools"
  # shellcheck disable=SC2086
  "$1" -m pip install --disable-pip-version-check $isolation -e '.[dev]' >"$folder/.pip.log" 2>&1 \
    || { cat "$folder/.pip.log" >&2; die "pip could not install this checkout; see above"; }
}

active=$(command -v python3 || true)
if [[ -n ${GLM53_PYTHON:-} ]]; then
  base=$(command -v "$GLM53_PYTHON" || true)
  [[ -n $base ]] || die "GLM53_PYTHON=$GLM53_PYTHON is no program; name a Python interpreter"
  supported "$(sglang_of "$base")" \
    || die "GLM53_PYTHON=$base has SGLang '$(sglang_of "$base")'; supported are 0.5.22 and 0.5.23"
  folder=.venv-layer
  if [[ $(cat "$folder/.base" 2>/dev/null) != "$base" ]]; then make_layer "$base" "$folder"; fi
else
  folder=.venv
  if [[ ! -x $folder/bin/python ]]; then
    if [[ -n $active ]] && supported "$(sglang_of "$active")"; then
      make_layer "$active" "$folder"
    else
      python=$(find_python)
      say "making $folder with $python"
      make_venv "$python" "$folder"
    fi
  fi
fi
python=$PWD/$folder/bin/python

# Everything below is skipped if nothing changed since it was last done.
installed() { # what must stay as it was: the metadata, SGLang, and that this checkout is what runs
  cat pyproject.toml setup.py | cksum
  (cd / && "$python" -c 'import importlib.metadata as m, sglang_glm53 as ours
print(m.version("sglang"), ours.__file__)' 2>/dev/null) || true
}
key=$(installed)
stamp=$folder/.ready
if [[ $(cat "$stamp" 2>/dev/null) != "$key" ]]; then
  version=$(sglang_of "$python")
  if [[ -z $version ]]; then
    say "installing SGLang $DEFAULT_SGLANG with PyTorch: several GB, some minutes"
    install_sglang "$python"
  elif ! supported "$version"; then
    die "$folder has SGLang $version; supported are 0.5.22 and 0.5.23: remove $folder, run again"
  fi
  install_project "$python"
  installed > "$stamp"
  say "ready: SGLang $(sglang_of "$python") in $folder"
fi
echo "$python"
