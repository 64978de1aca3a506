"""Who may put files where: nothing is unpickled, nothing is believed that another user could have written."""

from __future__ import annotations

import ast
import json
import os
import pickle
import pwd
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith import files
from opsmith.authoring.prototype import read
from opsmith.cli import hf
from opsmith.cli.llm import gemma
from opsmith.compiler import Config, Plan
from opsmith.compiler.kept import Kept, TuningCache, directory
from opsmith.kernels import cache
from opsmith.profiler import marks
from opsmith.profiler.result import Profile
from tests.profiler.conftest import fixed_roofs  # noqa: F401  the roofs take seconds to measure

ROOT = Path(__file__).parents[2]

# Nothing unpickles, and Python is made of text in four places only.

READS_OBJECTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
# What builds functions of names and bound objects; each says there why no other text gets in.
MAKES_PYTHON = {
    "src/opsmith/call/forms.py",
    "src/opsmith/compiler/steps/source.py",
    "src/opsmith/profiler/marks.py",
}
RUN_A_SHELL = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
LOADS = {"torch.load", "torch.jit.load"}
WORTH_A_LOOK = re.compile(
    rf"\b({'|'.join(READS_OBJECTS)}|exec|eval|__import__|load|shell|system|popen|getoutput|trust_\w+)\b"
)


def dangers(source: str, may_make_python: bool = False) -> Iterator[str]:
    """What in a file could run code that somebody else wrote."""
    for node in ast.walk(ast.parse(source if WORTH_A_LOOK.search(source) else "")):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            yield from {str(n).split(".")[0] for n in (module, *(a.name for a in node.names))} & READS_OBJECTS
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in ("exec", "eval", "__import__") and not may_make_python:
            yield name
        if name in RUN_A_SHELL or given.get("shell", "False") != "False":
            yield f"{name}, a shell"
        if name in LOADS and given.get("weights_only") != "True":
            yield name
        for key in ("allow_pickle", "trust_remote_code"):
            if given.get(key, "False") != "False":
                yield f"{name}, {key}"


def test_nothing_unpickles_evaluates_or_asks_a_shell() -> None:
    found = []
    for file in sorted((*ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py"))):
        name = str(file.relative_to(ROOT))
        found += [f"{name}: {danger}" for danger in dangers(file.read_text(), name in MAKES_PYTHON)]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "import a, dill as b",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_what_is_looked_for_is_found(line: str) -> None:
    assert list(dangers(line))


class Payload:
    """Pickled, it is a file that leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def bert(folder: Path) -> Path:
    """A tiny model's folder."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50)).save_pretrained(folder)
    return folder


def checkpoint(name: str) -> Callable[[Path], object]:
    """A folder whose weights are the file, under a name that weights have."""

    def load(file: Path) -> object:
        folder = bert(file.with_name("model"))
        (folder / "model.safetensors").unlink()
        shutil.copy(file, folder / name)
        return hf.read(folder)

    return load


def manifest(file: Path) -> object:
    store = cache.Store(file.with_name("kernels"))
    store.prepare()
    library = store.folder("libraries") / "one.so"
    shutil.copy(file, library)
    shutil.copy(file, f"{library}.json")
    assert store.manifest(library) is None
    raise ValueError("not used")


def kept(file: Path) -> object:
    file.chmod(0o600)
    assert TuningCache(file) == {}
    raise ValueError("counts as empty")


@pytest.mark.parametrize(
    "loader",
    [
        Plan.load,
        Profile.load,
        Config.load,
        read,
        kept,
        manifest,
        checkpoint("model.safetensors"),
        checkpoint("pytorch_model.bin"),
    ],
    ids=["plan", "profile", "config", "prototype", "tuning", "manifest", "safetensors", "bin"],
)
def test_a_pickle_in_any_file_is_refused_and_does_not_run(
    loader: Callable[[Path], object], tmp_path: Path
) -> None:
    """The same bytes do run where they are unpickled, so that what is tested is the refusal."""
    mark = tmp_path / "ran"
    for pickled in (pickle.dumps(Payload(mark)), None):
        file = tmp_path / "file"
        if pickled is None:
            torch.save(Payload(mark), file)  # a zip file with a pickle inside
        else:
            pickle.loads(pickled)
            mark.rmdir()
            file.write_bytes(pickled)
        with pytest.raises(ValueError, match=r"."):
            loader(file)
        assert not mark.exists()
        shutil.rmtree(tmp_path / "model", ignore_errors=True)


def test_code_of_a_tokenizer_does_not_run_though_somebody_says_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal transformers asks, unless it is told. Code of a model is in tests/cli/test_optimize.py."""
    mark = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')  # which has no tokenizer of the library's
    settings = {"tokenizer_class": "Zonk", "auto_map": {"AutoTokenizer": ["code.Zonk", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda question: "y")
    monkeypatch.setattr(hf, "read", lambda folder: nn.Identity())
    with pytest.raises(ValueError, match="has no tokenizer that loads"):
        hf.load_with_tokenizer(tmp_path)
    assert not mark.exists()


def test_a_plans_program_is_text_that_never_runs(tmp_path: Path) -> None:
    mark, model, x = tmp_path / "ran", nn.Sequential(nn.LayerNorm(8)).eval(), torch.ones(2, 8)
    opsmith.optimize(model, x, config=Config(tune=False))
    plan = model.opsmith.plan
    for shape in plan.shapes:
        shape.source = f"import os\nos.mkdir({str(mark)!r})\n" + shape.source
        for step in shape.steps:
            step.implementation = step.site = f"__import__('os').mkdir({str(mark)!r})"
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    opsmith.restore(model)
    opsmith.optimize(model, x, plan=again, config=Config(tune=False))
    model(x)
    assert not mark.exists()
    assert {s.implementation for shape in model.opsmith.plan.shapes for s in shape.steps} <= {
        "native",
        "eager",
    }


def test_names_of_a_models_parts_do_not_become_code(tmp_path: Path) -> None:
    """Programs are compiled from text in which parts are named: any string may name a part, but for dots."""
    name = "a'\nimport os; os_mkdir('ran')\n#b\"\"\"; [red] {{ 7 }} %s \\"
    model = nn.Sequential()
    model.add_module(name, nn.LayerNorm(8))
    model.eval()
    x = torch.randn(2, 8)
    with torch.no_grad():
        expected = model(x)
        opsmith.optimize(model, x, config=Config(tune=False))
        torch.testing.assert_close(model(x), expected)
        for shape in model.opsmith.plan.shapes:
            # Assignments and calls of what was bound: no import, no text of a name.
            assert not [
                n for n in ast.walk(ast.parse(shape.source)) if isinstance(n, ast.Import | ast.Global)
            ]
            assert "mkdir" not in shape.source
        for graph in model.opsmith.graphs:  # and as the profiler annotates them
            for program in graph.programs.by_key.values():
                assert program is not None
                marks._annotated(program, dict.fromkeys(program.lines, "a'\n\"\\"))
        page = opsmith.profile(
            model, x, budget_s=0.1
        ).to_html()  # which compiles the programs again, annotated
    assert page.count("<script") == 2


# Rights


def rights(folder: Path) -> list[str]:
    """What in a folder others have a right to."""
    every = (folder, *folder.rglob("*"))
    return [f"{p.name} {stat.filemode(p.lstat().st_mode)}" for p in every if p.lstat().st_mode & 0o077]


def filled(path: Path) -> Kept[int]:
    file: Kept[int] = Kept(path, 1, "here", int)
    file.put("a", 1)
    file.save()
    return Kept(path, 1, "here", int)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_is_kept_is_its_owners_alone(umask: int, tmp_path: Path) -> None:
    """The folders above that had to be made too: who can rename these can put others in their place."""
    old = os.umask(umask)
    try:
        found = filled(tmp_path / "user/opsmith/tuning/times.json")
        cache.Store(tmp_path / "kernels/of/mine").prepare()
        with cache.Store(tmp_path / "kernels/of/mine").lock("one"):
            assert rights(tmp_path / "kernels") == []
    finally:
        os.umask(old)
    assert found.get("a") == 1
    assert rights(tmp_path / "user") == []


@pytest.mark.parametrize("umask", [0o000, 0o027])
def test_what_a_user_asked_for_has_the_rights_that_their_umask_leaves(umask: int, tmp_path: Path) -> None:
    old = os.umask(umask)
    try:
        file = Plan().save(tmp_path / "plan.json")
    finally:
        os.umask(old)
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask


def owned_by(uid: int, monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """As if these (links themselves, where they are links) were somebody else's."""
    links = {str(path): os.path.islink(path) for path in paths}
    for name, real in (("lstat", os.lstat), ("stat", os.stat)):

        def look(
            path: Any, real: Any = real, itself: bool = name == "lstat", **options: Any
        ) -> os.stat_result:
            found: os.stat_result = real(path, **options)
            theirs = itself or not options.get("follow_symlinks", True) or not links.get(str(path), True)
            return os.stat_result((*found[:4], uid, *found[5:])) if theirs and str(path) in links else found

        monkeypatch.setattr(os, name, look)


def lax(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(path.stat().st_mode | 0o022)


def foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned_by(12345, monkeypatch, path)


def linked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's link to what is ours: it passes every look, and leads elsewhere a moment later."""
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))
    owned_by(12345, monkeypatch, path)


PLANTED = pytest.mark.parametrize(
    ("plant", "why"),
    [
        (lax, "can be written by other users; run: chmod go-w"),
        (foreign, r"belongs to another user \(uid 12345\)"),
        (linked, r"belongs to another user \(uid 12345\)"),
    ],
)


@PLANTED
@pytest.mark.parametrize("part", ["", "tuning", "tuning/times.json"], ids=["above", "folder", "file"])
def test_times_and_proofs_that_others_could_have_written_count_for_nothing(
    plant: Callable[..., None], why: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof that another user wrote would spare a wrong kernel its proof."""
    file = tmp_path / "user/tuning/times.json"
    assert filled(file).get("a") == 1
    plant(tmp_path / "user" / part, monkeypatch)
    again: Kept[int] = Kept(file, 1, "here", int)
    assert again.get("a") is None
    again.put("b", 2)
    if part.endswith("json"):  # a file is replaced by one's own, or what a link led to
        again.save()
        monkeypatch.undo()
        assert rights(file.resolve()) == []
        assert Kept(file, 1, "here", int).get("b") == 2
    else:
        with pytest.warns(
            RuntimeWarning, match=rf"neither kept nor looked up \(.*{why}.*or set OPSMITH_TUNING"
        ):
            again.save()


@PLANTED
def test_libraries_that_others_could_have_written_are_not_loaded(
    plant: Callable[..., None], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loaded library is code that runs. More of it is in tests/kernels/test_cache.py."""
    store = cache.Store(tmp_path / "user/kernels")
    store.prepare()
    made = tmp_path / "one.so"
    made.write_bytes(b"code")
    library = store.folder("libraries") / "one.so"
    store.seal(made, library, {}, 0o700)
    assert store.manifest(library) is not None
    plant(store.path, monkeypatch)
    assert store.manifest(library) is None
    with pytest.raises(cache.Unusable, match=why):
        store.prepare()


def test_an_administrators_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of root that others can read, and not write, are what a shared cache is made of."""
    file = tmp_path / "shared/tuning/times.json"
    filled(file)
    for path in (file, *file.parents[:2]):
        path.chmod(path.stat().st_mode | 0o055)
    owned_by(0, monkeypatch, file, *file.parents[:2])
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert Kept(file, 1, "here", int).get("a") == 1
    owned_by(54321, monkeypatch, file)
    assert Kept(file, 1, "here", int).get("a") is None


@PLANTED
def test_a_converted_model_that_others_could_have_written_is_not_taken(
    plant: Callable[..., None], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest holds for damage alone: who plants a model plants a manifest with it."""
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gemma, "missing", lambda: None)
    monkeypatch.setattr(gemma, "_convert", lambda place: (place.mkdir(), (place / "own").write_text("")))
    old = os.umask(0)
    try:
        first = gemma.folder()
    finally:
        os.umask(old)
    assert first.is_relative_to(tmp_path / "cache")
    assert first.parent.stat().st_mode & 0o777 == 0o700
    plant(first.parent, monkeypatch)
    assert gemma.folder().is_relative_to(tmp_path / f"opsmith-{os.getuid()}")


# Links


def test_a_file_is_written_beside_its_place_under_a_name_that_nobody_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "guessed")
    (tmp_path / ".plan.json.guessed.tmp").symlink_to(victim)
    with pytest.raises(ValueError, match=r"plan: can't write .*: File exists"):
        Plan().save(tmp_path / "plan.json")
    assert victim.read_text() == "precious"


def test_a_link_of_the_user_is_written_through_and_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "plan.json"
    link.symlink_to("real/plan.json")
    Plan().save(link)
    assert link.is_symlink()
    assert Plan.load(tmp_path / "real/plan.json") == Plan()


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        Plan().save(tmp_path / "pipe")
        assert json.loads(os.read(reader, 1 << 16)) == json.loads(Plan().to_json())
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


# Names


def test_a_user_without_a_home_keeps_things_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `~` stands for is then `~`: a folder of that name, wherever the program was started."""
    for name in ("OPSMITH_TUNING", "OPSMITH_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # whom no list of users knows
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.getpwnam("nobody_of_this_name"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert directory() == tmp_path / "opsmith-54321/tuning"
    assert cache.configured().path == tmp_path / "opsmith-54321/kernels"


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/b", "nul\0", "x\ny", "a b", "", "..", "ünder"])
def test_names_of_a_project_are_words(name: str, tmp_path: Path) -> None:
    """They become names of files, of C++ and of the dispatcher."""
    from opsmith.authoring import project

    with pytest.raises(ValueError, match="is no name for C"):
        project.kernels(str(tmp_path / "operator.py"), name, inputs={"x": "N"}, outputs={"y": "N"})
    with pytest.raises(ValueError, match="is no name for C"):
        project.kernels(str(tmp_path / "operator.py"), "named", inputs={name: "N"}, outputs={"y": "N"})


def test_a_wheel_takes_nothing_from_outside_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    from opsmith.authoring.project import wheel

    monkeypatch.setattr(wheel, "projects_kernels", lambda folder: [])
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.py").write_text("secret")
    folder = tmp_path / "named"
    folder.mkdir()
    (folder / "operator.py").write_text("")
    (folder / "file.py").symlink_to(tmp_path / "outside/secret.py")
    (folder / "folder").symlink_to(tmp_path / "outside")
    made = wheel.write_wheel(folder, tmp_path / "dist")
    with zipfile.ZipFile(made) as archive:
        assert [n for n in archive.namelist() if "secret" in n or "file.py" in n] == []
        assert all(not n.startswith(("/", "..")) for n in archive.namelist())


def test_a_configs_names_are_looked_up_and_nothing_else(tmp_path: Path) -> None:
    for name in ("../../etc/passwd", "native\0", "__import__('os')"):
        with pytest.raises(ValueError, match=r"no implementation|unknown"):
            opsmith.optimize(nn.LayerNorm(8), torch.ones(2, 8), config=Config(pin={"layer_norm": name}))
    file = tmp_path / "opsmith.toml"
    file.write_text('dtype = "../bfloat16"')
    with pytest.raises(ValueError, match="dtype: Input should be"):
        Config.load(file)


def test_no_warning_where_all_is_well(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert filled(tmp_path / "user/tuning/times.json").get("a") == 1
    assert json.loads((tmp_path / "user/tuning/times.json").read_text())["entries"] == {"a": 1}
