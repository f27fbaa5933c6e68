"""Where packages come from: pip's and uv's configuration as those read it, and what a build is shown of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpool.agent.environments.indexes import Indexes, configuration_files, path_of, read_indexes
from tests.tools.packages import PackageIndex


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_nothing_configured_asks_the_installers_own_index() -> None:
    found = read_indexes([], {})
    assert found.asks_default
    assert found.addresses == ()
    assert found.variables() == (("UV_INDEX_STRATEGY", "unsafe-best-match"),)


def test_pips_files_count_in_their_order_and_its_variables_above_them(tmp_path: Path) -> None:
    weak = written(
        tmp_path,
        "weak/pip.conf",
        "[global]\nindex-url = https://weak.test/simple\nextra-index-url =\n  file:///a\n  https://b.test\n",
    )
    strong = written(
        tmp_path,
        "strong/pip.conf",
        "[install]\nfind_links = /wheels https://links.test/\n[global]\nindex-url = https://strong.test/simple\n",
    )
    found = read_indexes([weak, tmp_path / "none", strong], {"PIP_TRUSTED_HOST": "b.test"})
    assert found.default == "https://strong.test/simple"
    assert found.extra == ("file:///a", "https://b.test")
    assert found.find_links == ("/wheels", "https://links.test/")
    assert dict(found.variables()) == {
        "UV_DEFAULT_INDEX": "https://strong.test/simple",
        "UV_INDEX": "file:///a https://b.test",
        "UV_FIND_LINKS": "/wheels,https://links.test/",
        "UV_INSECURE_HOST": "b.test",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert found.remote == ("https://strong.test/simple", "https://b.test", "https://links.test/")
    assert not found.asks_default
    over = read_indexes([weak], {"PIP_INDEX_URL": "https://variable.test/simple"})
    assert over.default == "https://variable.test/simple"


def test_uvs_configuration_wins_over_pips(tmp_path: Path) -> None:
    pip = written(tmp_path, "pip.conf", "[global]\nindex-url = https://pip.test/simple\n")
    uv = written(
        tmp_path,
        "uv.toml",
        '[[index]]\nurl = "https://uv.test/simple"\ndefault = true\n[[index]]\nurl = "https://more.test"\n'
        '[[index]]\nname = "x"\nurl = "https://explicit.test"\nexplicit = true\n[pip]\nfind-links = ["/wheels"]\n',
    )
    found = read_indexes([pip, uv], {})
    assert found == Indexes("https://uv.test/simple", ("https://more.test",), ("/wheels",))
    found = read_indexes([pip, uv], {"UV_INDEX": "mine=https://mine.test a=https://a.test"})
    assert found.extra == ("https://mine.test", "https://a.test")
    assert found.default == "https://uv.test/simple"


def test_files_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    files = [written(tmp_path, "pip.conf", "=\n[["), written(tmp_path, "uv.toml", "= =")]
    assert read_indexes(files, {}).addresses == ()


def test_no_index_leaves_the_folders_alone(tmp_path: Path) -> None:
    found = read_indexes([], {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)})
    assert not found.asks_default
    assert found.remote == ()
    assert found.folders() == (tmp_path,)
    assert found.options == ("--no-index",)


def test_certificates_and_proxies_are_taken_over_and_nothing_else(tmp_path: Path) -> None:
    certificate = written(tmp_path, "ca.pem", "x")
    environ = {
        "SSL_CERT_FILE": str(certificate),
        "https_proxy": "http://me:word@proxy.test:3128",
        "NO_PROXY": "inner.test",
        "GPOOL_TEST_SECRET": "planted",
    }
    found = read_indexes([], environ)
    assert found.certificate == certificate
    assert dict(found.proxies) == {
        "HTTPS_PROXY": "http://me:word@proxy.test:3128",
        "NO_PROXY": "inner.test",
    }
    assert found.secrets == ("me:word", "word")
    assert "planted" not in repr(found)


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("file:///a%20b/simple", Path("/a b/simple")),
        ("/a/b", Path("/a/b")),
        ("https://a.test/b", None),
    ],
)
def test_addresses_on_this_machine_are_told_from_others(address: str, path: Path | None) -> None:
    assert path_of(address) == path


def test_an_index_on_disk_is_shown_with_the_files_its_pages_name(tmp_path: Path) -> None:
    index = PackageIndex(tmp_path / "mirror")
    assert Indexes(index.address).folders() == (index.pages,)
    index.wheel("thing")
    assert Indexes(index.address).folders() == (index.folder,)
    assert Indexes("file:///nowhere").folders() == ()
    both = Indexes(index.address, find_links=(str(index.files),))
    assert both.folders() == (index.folder,)


def test_a_page_that_names_a_file_elsewhere_never_opens_the_whole_disk(tmp_path: Path) -> None:
    index = PackageIndex(tmp_path / "mirror")
    index.wheel("thing")
    page = index.pages / "thing" / "index.html"
    page.write_text('<a href="file:///etc/passwd">x</a>')
    assert Indexes(index.address).folders() == (index.pages,)


def test_configuration_is_looked_for_where_pip_and_uv_do(tmp_path: Path) -> None:
    files = configuration_files({}, tmp_path, tmp_path / "venv")
    assert tmp_path / ".config/pip/pip.conf" in files
    assert tmp_path / "venv/pip.conf" in files
    assert tmp_path / ".config/uv/uv.toml" in files
    named = configuration_files({"PIP_CONFIG_FILE": "/x/my.conf"}, tmp_path, tmp_path)
    assert [file for file in named if "uv" not in str(file)] == [Path("/x/my.conf")]
    none = configuration_files({"PIP_CONFIG_FILE": "/dev/null"}, tmp_path, tmp_path)
    assert not [file for file in none if "uv" not in str(file)]


def test_only_what_is_in_reach_is_asked(tmp_path: Path) -> None:
    here, gone = f"file://{tmp_path}", "file:///nowhere/at/all"
    far = "https://far.test/simple"
    mixed = Indexes(far, (gone, here), (str(tmp_path), "/nowhere"))
    assert mixed.reachable(network=True) == Indexes(far, (here,), (str(tmp_path),))
    assert mixed.reachable(network=False) == Indexes(here, (), (str(tmp_path),))
    assert Indexes(extra=(here,)).reachable(network=True) == Indexes(extra=(here,))
    assert Indexes(extra=(here,)).reachable(network=False) == Indexes(here)
    assert Indexes(gone, (far,)).reachable(network=True) == Indexes(far)
    assert Indexes().reachable(network=True) == Indexes()
    assert Indexes().reachable(network=False) is None
    links = Indexes(find_links=(str(tmp_path),)).reachable(network=False)
    assert links == Indexes(find_links=(str(tmp_path),), no_index=True)
    assert Indexes(here, no_index=True).reachable(network=True) is None
