"""A runner in another process, which gets only the pickled plans.

The parent starts `python -m support.child_runner` and exchanges pickles with it through pipes.
"""

import pickle
import subprocess
import sys
from pathlib import Path


class Child:
    """A process that loads a model once and runs plans on it.

    Args:
        model: folder or file of the model.
        build: build of the native kernels.
        weight_format: of NativeModel.
    """

    def __init__(self, model, build, weight_format):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.child_runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
        )
        self.ask((str(model), build, weight_format))

    def runner(self, **shape):
        """Return a new runner, which has received no plan yet."""
        self.ask(shape)
        return ChildRunner(self)

    def ask(self, message):
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()
        answer = pickle.load(self.process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.process.communicate()


class ChildRunner:
    supports_lora = False

    def __init__(self, child):
        self._child = child

    def execute(self, plan):
        return self._child.ask(plan)


def main():
    from support.engines import make_runner
    from support.native import native_library
    from treadle.backends.cpu.model import NativeModel
    from treadle.models.registry import load_path
    from treadle.scheduler import StepPlan

    pipe = sys.stdout.buffer
    sys.stdout = sys.stderr
    runner = loaded = model = None
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = None
        try:
            if isinstance(message, StepPlan):
                answer = runner.execute(message)
            elif isinstance(message, dict):
                runner = make_runner(loaded, model, **message)
            else:
                path, build, weight_format = message
                loaded = load_path(Path(path))
                model = NativeModel(
                    loaded.config, loaded.weights, library=native_library(build), weight_format=weight_format,
                    max_model_len=2048,
                )  # fmt: skip
        except Exception as error:
            answer = error
        pickle.dump(answer, pipe)
        pipe.flush()


if __name__ == "__main__":
    main()
