"""Flag over variable over ./gpool.toml over the user's profile; credentials go where the user sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpool import Invalid, NotSignedIn
from gpool.client import config


def test_a_flag_wins_over_a_variable_over_the_project_over_the_profile(tmp_path: Path) -> None:
    environ = {"GPOOL_HOME": str(tmp_path / "home")}
    here = tmp_path / "project"
    here.mkdir()
    key_file = tmp_path / "key"
    key_file.write_text("from-profile\n")

    def found(url: str | None = None, **more: str) -> tuple[str, str]:
        settings = config.load(url, environ=environ | more, directory=here)
        return settings.url, settings.key

    assert found() == (config.LOCAL_URL, "")
    config.save_profile("local", "http://one:1", key_file, folder=tmp_path / "home")
    assert found() == ("http://one:1", "from-profile")
    other_key = tmp_path / "other"
    other_key.write_text("of-the-second\n")
    config.save_profile("second", "http://two:2", other_key, folder=tmp_path / "home")
    assert found() == ("http://one:1", "from-profile")
    for text in ('url = "http://two:2"', 'profile = "second"'):
        (here / "gpool.toml").write_text(text)
        assert found() == ("http://two:2", "of-the-second")
    assert found(GPOOL_PROFILE="local") == ("http://one:1", "from-profile")
    assert found(GPOOL_URL="http://three:3", GPOOL_KEY="k") == ("http://three:3", "k")
    assert found("http://four:4", GPOOL_URL="http://three:3", GPOOL_KEY="k") == (
        "http://four:4",
        "k",
    )


def test_a_project_file_that_only_defines_tasks_selects_no_pool(tmp_path: Path) -> None:
    (tmp_path / "gpool.toml").write_text('[tasks.train]\ncommand = ["python", "train.py"]\n')
    environ = {"GPOOL_HOME": str(tmp_path / "home")}
    assert config.load(environ=environ, directory=tmp_path).url == config.LOCAL_URL


def test_the_project_is_that_of_the_variable_then_of_the_project_file(tmp_path: Path) -> None:
    environ = {"GPOOL_HOME": str(tmp_path / "home")}

    def found(url: str | None = None, **more: str) -> str:
        return config.load(url, environ=environ | more, directory=tmp_path).project

    assert found() == ""
    (tmp_path / "gpool.toml").write_text('project = "thesis"\n')
    assert found() == found("http://four:4") == "thesis"
    assert found(GPOOL_PROJECT="course") == "course"
    (tmp_path / "gpool.toml").write_text('project = "two words"\n')
    with pytest.raises(Invalid, match=r"gpool\.toml.*not a project"):
        found()
    with pytest.raises(Invalid, match=r"GPOOL_PROJECT.*not a project"):
        found(GPOOL_PROJECT="=1")


def test_a_key_from_a_file_is_never_sent_to_another_address(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret")
    config.save_profile("local", "http://one:1", key_file, folder=tmp_path)
    environ = {"GPOOL_HOME": str(tmp_path)}
    assert config.load("http://evil:1", environ=environ, directory=tmp_path).key == ""
    assert config.load("http://one:1/", environ=environ, directory=tmp_path).key == "secret"


@pytest.mark.parametrize(
    "text",
    [
        'url = "http://evil:1"',
        'url = "http://one:1@evil.example"',
        'url = "http://evil:1"\nplain_http = true',
        'url = "http://evil:1"\nprofile = "local"',
        'url = "http://evil:1"\nkey_file = "key"',
        'url = "http://evil:1"\nsession_file = "session.json"',
        'url = "http://evil:1"\nkey = "gpk_of_the_file"',
    ],
)
def test_a_project_file_sends_credentials_to_no_address_of_its_own(
    tmp_path: Path, text: str
) -> None:
    """Finding 17: GPOOL_KEY went to any address that ./gpool.toml of a cloned repository named."""
    key_file = tmp_path / "key"
    key_file.write_text("secret")
    config.save_profile("local", "http://one:1", key_file, folder=tmp_path / "home")
    here = tmp_path / "cloned"
    here.mkdir()
    (here / "gpool.toml").write_text(text)
    environ = {"GPOOL_HOME": str(tmp_path / "home"), "GPOOL_KEY": "gpk_MY_REAL_POOL_KEY"}
    with pytest.raises(Invalid, match=r"no profile in|may not stand there|has another URL"):
        config.load(environ=environ, directory=here)
    with pytest.raises(Invalid):  # nor the profile's own credentials
        config.load(environ={"GPOOL_HOME": environ["GPOOL_HOME"]}, directory=here)
    # The control: the key goes to the address that the user names, and to the user's own profile.
    assert config.load("http://evil:1", environ=environ, directory=here).key == environ["GPOOL_KEY"]
    (here / "gpool.toml").write_text('url = "http://one:1/"')
    found = config.load(environ=environ, directory=here)
    assert (found.url, found.key) == ("http://one:1", environ["GPOOL_KEY"])


def test_trust_and_the_size_of_values_come_from_argument_variable_or_the_pools_own_profile(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.toml").write_text(
        'profile = "lab"\n[profiles.lab]\nurl = "http://one:1"\n'
        'trust = ["team:lab", "team:b"]\nmax_value = "1GiB"\n'
    )

    def found(url: str | None = None, *, given: Any = None, **more: str) -> tuple[Any, int]:
        environ = {"GPOOL_HOME": str(tmp_path)} | more
        settings = config.load(url, environ=environ, directory=tmp_path, **(given or {}))
        return settings.trust, settings.max_value_bytes

    assert found() == (("team:lab", "team:b"), 1 << 30)
    assert found("http://two:2") == ((), 64 << 20)  # a profile's trust is for its own pool
    assert found(GPOOL_TRUST="team:a, team:c") == (("team:a", "team:c"), 1 << 30)
    assert found(GPOOL_MAX_VALUE="200MB")[1] == 200_000_000
    assert found(given={"trust": [], "max_value": 5000}, GPOOL_TRUST="team:a") == ((), 5000)
    for wrong in ("lab", "team:", "user:ana", "anyone", "team:a,"):
        with pytest.raises(Invalid, match="write team:NAME"):
            found(GPOOL_TRUST=wrong)
    for wrong in ("much", "0", "-5MB"):
        with pytest.raises(Invalid, match="write a size, like 200MB"):
            found(GPOOL_MAX_VALUE=wrong)


def test_rules_for_results_survive_another_start_of_the_pool(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("k")
    file = config.save_profile("local", "http://one:1", key_file, folder=tmp_path)
    file.write_text(file.read_text() + 'trust = "team:lab"\n')

    def trusted() -> tuple[str, ...]:
        return config.load(environ={"GPOOL_HOME": str(tmp_path)}, directory=tmp_path).trust

    config.save_profile("local", "http://one:1", key_file, folder=tmp_path)
    assert trusted() == ("team:lab",)
    config.save_profile("local", "http://another:1", key_file, folder=tmp_path)
    assert trusted() == ()


@pytest.mark.parametrize("text", ['trust = ["team:lab"]', 'max_value = "1TB"'])
def test_a_cloned_repository_cannot_say_whom_to_trust(tmp_path: Path, text: str) -> None:
    (tmp_path / "gpool.toml").write_text(text)
    with pytest.raises(Invalid, match="may not stand there"):
        config.load(environ={"GPOOL_HOME": str(tmp_path / "home")}, directory=tmp_path)


def test_the_profile_file_is_for_its_owner_only(tmp_path: Path) -> None:
    file = config.save_profile("local", "http://one:1", tmp_path / "key", folder=tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600


def test_saving_a_profile_keeps_the_others_and_the_choice(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k")
    config.save_profile("work", "http://work:1", key, folder=tmp_path)
    config.save_profile("local", "http://one:1", key, folder=tmp_path)
    environ = {"GPOOL_HOME": str(tmp_path)}
    assert config.load(environ=environ, directory=tmp_path).url == "http://work:1"
    assert config.load(environ=environ, directory=tmp_path, profile="local").url == "http://one:1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("url = ", "cannot be read"),
        ('adress = "x"', "unknown setting 'adress'"),
        ('profile = "nowhere"', "there is no profile 'nowhere'"),
        ('url = "ftp://x"', "not the URL of a pool"),
        ('url = "http://[::1"', "not the URL of a pool"),
        ('url = "http://"', "not the URL of a pool"),
        ('url = "http://one:99999"', "not the URL of a pool"),
        ('profile = ["local"]', "there is no profile"),
        ('key = "gpk_1"', "may not stand there"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "gpool.toml").write_text(text)
    with pytest.raises(Invalid, match=said):
        config.load(environ={"GPOOL_HOME": str(tmp_path / "home")}, directory=tmp_path)


def test_a_key_with_a_foreign_character_is_refused(tmp_path: Path) -> None:
    environ = {"GPOOL_HOME": str(tmp_path), "GPOOL_KEY": "gpk_ä"}
    with pytest.raises(Invalid, match="holds a character no key has"):
        config.load(environ=environ, directory=tmp_path)


def test_a_missing_key_file_says_which(tmp_path: Path) -> None:
    config.save_profile("local", "http://one:1", tmp_path / "gone", folder=tmp_path)
    with pytest.raises(NotSignedIn, match="gone"):
        config.load(environ={"GPOOL_HOME": str(tmp_path)}, directory=tmp_path)


def test_blanks_around_a_key_are_not_part_of_it(tmp_path: Path) -> None:
    """As a file or a variable that was copied has them."""
    environ = {"GPOOL_HOME": str(tmp_path), "GPOOL_KEY": " gpk_1\r\n"}
    assert config.load(environ=environ, directory=tmp_path).key == "gpk_1"


def test_a_certificate_is_kept_for_its_own_pool_only(tmp_path: Path) -> None:
    """Signed in to another one under the same name, it would be refused for the certificate of the first."""

    def signed_in(url: str, fingerprint: str | None = None) -> str | None:
        config.save_sign_in(
            "lab", url, tmp_path / "session", folder=tmp_path, fingerprint=fingerprint
        )
        return config.load(environ={"GPOOL_HOME": str(tmp_path)}, directory=tmp_path).fingerprint

    assert signed_in("https://one", "1" * 64) == "1" * 64
    assert signed_in("https://one/") == "1" * 64
    assert signed_in("https://two") is None
