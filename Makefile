# Two commands on a bare machine with Python 3.11 or newer:
#
#   make serve     .venv, install, default model, server on 127.0.0.1:8000
#   make test      .venv, install with the tools, scripts/check
#
# PYTHON=... chooses the interpreter, MODEL=... the model, ARGS="--port 9000" more flags of `slipstream serve`.

.PHONY: help serve test check install clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

serve:
	@PYTHON="$(PYTHON)" MODEL="$(MODEL)" exec bash "$(CURDIR)/scripts/serve" $(ARGS)

test:
	@PYTHON="$(PYTHON)" bash "$(CURDIR)/scripts/install" dev
	@bash "$(CURDIR)/scripts/check"

check:
	@bash "$(CURDIR)/scripts/check"

install:
	@PYTHON="$(PYTHON)" bash "$(CURDIR)/scripts/install" dev

clean:
	rm -rf "$(CURDIR)/.venv" "$(CURDIR)/.mypy_cache" "$(CURDIR)/.pytest_cache" "$(CURDIR)/.ruff_cache" "$(CURDIR)/.import_linter_cache"
