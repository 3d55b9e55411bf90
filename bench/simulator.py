"""python -m bench.simulator: a server that behaves like SGLang, without a GPU. Its numbers are simulated.

It takes SGLang's command line, e.g.

    python -m bench.simulator --model-path FOLDER --port 30000 --mem-fraction-static 0.8 --enable-metrics

where FOLDER holds a config.json. What it simulates (version, card, time scale, failures) is set in the environment:
see ``bench/engines/simulator/options.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from bench.engines.sglang.model_shape import ModelShape, ShapeError
from bench.engines.simulator.arguments import parse
from bench.engines.simulator.options import OptionError, Options
from bench.engines.simulator.server import Server, load_config


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a server until it ends."""
    try:
        options = Options.read(env)
        arguments = parse(argv, options.version)
        path = str(arguments.values["model_path"])
        config = load_config(path, options)
        if config is None:
            return _complain(
                f"OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'. "
                "Use `repo_type` argument if needed. (simulated: no config.json there, and none in "
                "BENCH_SIMULATOR_MODEL_CONFIG)",
                1,
            )
        quantization = arguments.values.get("quantization")
        draft = options.draft_config if arguments.values.get("speculative_draft_model_path") else None
        shape = ModelShape.from_config(config, quantization=quantization, draft_config=draft)
        server = Server(options, arguments, shape, env)
    except (OptionError, ShapeError, LookupError) as error:
        return _complain(f"simulator: {error}", 2)
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(server.run())
    return 0


def _complain(text: str, code: int) -> int:
    sys.stderr.write(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
