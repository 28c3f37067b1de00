"""A script under `tierckpt run` sees, prints and ends with the same as without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm_python.servers import PYTHON, THROUGHOUT

NAMES = """
import os, sys
main = sys.modules["__main__"]
print(__name__, __file__, __package__, sys.argv, sys.path[0], main.__file__, main is not None)
print(sorted(n for n in globals() if n.startswith("__")), __builtins__, main.__dict__ is globals())
"""
MODULE = """
import sys
print(__name__, __file__, __package__, __spec__.name, sys.argv, sys.path[0])
from . import beside
"""
SCRIPTS = {
    "names": NAMES,
    "status": "import sys\nprint('out')\nsys.exit(3)",
    "text": "import sys\nsys.exit('the reason')",
    "raises": "def f():\n    raise ValueError('no')\ndef g():\n    f()\ng()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e",
    "syntax": "print('a')\nif:\n",
    "hook": "import sys\nsys.excepthook = lambda k, e, t: print('hook', k, t.tb_lineno)\n1 / 0",
    "atexit": "import atexit\natexit.register(print, 'end')\nprint('begin')\nraise SystemExit",
    "thread": """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print("late"))).start()
print("main", threading.current_thread() is threading.main_thread(), threading.active_count())
""",
    "killed": "import os, signal\nprint('a', flush=True)\nos.kill(os.getpid(), signal.SIGUSR2)",
    "aborted": "import os\nos.abort()",
    "interrupt": "raise KeyboardInterrupt",
    "stdin": "import sys\nprint([line.upper() for line in sys.stdin])",
    "debugger": "x = 5\nbreakpoint()\nprint('after', x)",
    "pickle": """
import pickle
class Point:
    def __init__(self, x): self.x = x
print(pickle.dumps(Point(1)), pickle.loads(pickle.dumps(Point(1))).x)
""",
    "processes": """
import multiprocessing as mp, sys
class Point:
    def __init__(self, x): self.x = x
def work(point):
    return point.x * 2, mp.current_process().name.partition("-")[0], __name__
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with mp.get_context(method).Pool(1) as pool:
            print(method, pool.map(work, [Point(3)]))
""",
    "signals": """
import signal, sys
print({s.name: str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD,
      signal.SIGUSR1, signal.SIGPIPE)}, signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(signal.set_wakeup_fd(-1))
""",
    "threads": """
import os, torch
print(len(os.listdir("/proc/self/task")), torch.cuda.is_initialized(), torch.get_num_threads())
""",
}
NOT_WARM = ("processes", "interrupt")
"""Scripts that the tests' own fork server would run in another way."""
INPUT = {"stdin": "one\ntwo\n", "debugger": "p x\nx = 7\nc\n"}


def run(command: list[str], folder: Path, text: str = "", **more: str) -> tuple[int, str, str]:
    env = {**os.environ, **THROUGHOUT, "XDG_CACHE_HOME": str(folder / "cache"), **more}
    done = subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, env=env, timeout=120
    )
    stderr = done.stderr.replace(PYTHON, sys.executable)
    said = [x for x in stderr.splitlines() if not x.startswith("tierckpt run:")]
    return done.returncode, done.stdout, "\n".join(said)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_output_and_end_are_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    words = ["script.py", "a", "--max-restarts"]
    plain = run([sys.executable, *words], tmp_path, INPUT.get(name, ""))
    python = sys.executable if name in NOT_WARM else PYTHON
    shim = [python, "-m", "tierckpt.run", "--max-restarts", "0"]
    assert run([*shim, *words], tmp_path, INPUT.get(name, "")) == plain


def test_a_module_is_run_as_by_the_interpreter(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("print('package')")
    (package / "beside.py").write_text("print('beside', __name__)")
    (package / "train.py").write_text(MODULE)
    for words in (["package.train", "a", "-m"], ["package.nothing"], ["package"]):
        plain = run([sys.executable, "-m", *words], tmp_path)
        shim = [PYTHON, "-m", "tierckpt.run", "--max-restarts", "0", "-m"]
        assert run([*shim, *words], tmp_path) == plain


def test_a_folder_with_a_main_module(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys, beside\nprint(sys.argv, sys.path[0])")
    (folder / "beside.py").write_text("print('beside')")
    plain = run([sys.executable, "app", "x"], tmp_path)
    assert run([PYTHON, "-m", "tierckpt.run", "app", "x"], tmp_path) == plain
    assert plain[0] == 0


def test_a_missing_script_ends_with_the_interpreters_status(tmp_path: Path) -> None:
    plain = run([sys.executable, "nothing.py"], tmp_path)
    assert plain[0] == 2
    shim = [PYTHON, "-m", "tierckpt.run", "--max-restarts", "0", "nothing.py"]
    assert run(shim, tmp_path) == plain


def test_the_command_tierckpt_run_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\nprint(sys.argv, sys.path[0])\nraise OSError(5)"
    )
    plain = run([sys.executable, "script.py", "-h"], tmp_path)
    shim = [PYTHON, "-m", "tierckpt", "run", "--max-restarts", "0", "script.py", "-h"]
    assert run(shim, tmp_path) == plain


def test_attempts_have_other_random_numbers(tmp_path: Path) -> None:
    """As processes that are started one after the other."""
    (tmp_path / "script.py").write_text(
        "import os, random, numpy, torch\n"
        "drawn = (random.random(), numpy.random.rand(), torch.rand(1).item())\n"
        "print(os.environ['TIERCKPT_ATTEMPT'], *drawn, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    shim = [PYTHON, "-m", "tierckpt.run", "--max-restarts", "5", "script.py"]
    status, out, _ = run(shim, tmp_path)
    first, second = (line.split() for line in out.splitlines())
    assert status == -signal.SIGKILL
    assert (first[0], second[0]) == ("1", "2")
    assert not set(first) & set(second)


def test_a_module_beside_the_script_hides_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "xxhash.py").write_text("print('the user has this')")
    (tmp_path / "script.py").write_text("import xxhash")
    shim = [PYTHON, "-m", "tierckpt.run", "--preload", "xxhash", "script.py"]
    assert run(shim, tmp_path)[:2] == (0, "the user has this\n")


def test_modules_that_allow_no_fork_are_left_to_the_script(tmp_path: Path) -> None:
    """Now, after the shim has started itself again, and in later runs."""
    place = tmp_path / "path"
    place.mkdir()
    starts = "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()"
    (place / "starts.py").write_text(f"print('starts')\n{starts}")
    (place / "draws.py").write_text("print('draws')\nimport torch\ntorch.manual_seed(7)")
    (tmp_path / "script.py").write_text(
        "import os\nprint(len(os.listdir(f'/proc/{os.getppid()}/task')))\nimport draws, starts"
    )
    path = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shim = [sys.executable, "-m", "tierckpt.run", "--preload", "draws,starts", "script.py"]
    left = "when it is imported: it is left to the script"
    here = ["1", "draws", "starts"]
    for expected in (["draws", "starts", *here], here):
        done = subprocess.run(
            shim, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == expected
        said = "\n".join(line for line in done.stderr.splitlines() if left in line)
        assert ("starts starts a thread" in said) == (expected != here)
        assert ("draws changes torch's random stream" in said) == (expected != here)
