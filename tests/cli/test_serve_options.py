"""Arguments of `treadle serve` are checked before the model is loaded."""

import socket

import pytest

from treadle.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "--port: must be between 0 and 65535, got 65536"),
        (["--max-body-mib", "0"], "--max-body-mib: must be greater than 0, got 0.0"),
        (["--max-body-mib", "nan"], "--max-body-mib: must be greater than 0, got nan"),
        (["--shutdown-grace", "-1"], "--shutdown-grace: must be a number of seconds, at least 0, got -1.0"),
        (["--shutdown-grace", "inf"], "--shutdown-grace: must be a number of seconds, at least 0, got inf"),
        (["--host", "300.0.0.1"], "--host: '300.0.0.1' is not an address of this machine"),
        (["--host", "a" * 70], "--host: "),
        (["--api-key", "cl\udce9"], "--api-key: must be text in UTF-8"),
        (["--api-key", "key\n"], "--api-key: must not hold control characters"),
        (["--api-key", "k\x01ey"], "--api-key: must not hold control characters"),
        (["--served-model-name", "m\udce9"], "--served-model-name: must be text in UTF-8, got 'm\\udce9'"),
    ],
)
def test_values_that_cannot_be(arguments, message, capsys):
    assert main(["serve", "/no/such/model", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"treadle: error: {message}")


@pytest.mark.parametrize(
    ("key", "problem"), [("cl\udce9", "must be text in UTF-8"), ("key\r", "must not hold control")]
)
def test_a_key_from_the_environment_that_no_client_can_send(key, problem, capsys, monkeypatch):
    monkeypatch.setenv("TREADLE_API_KEY", key)
    assert main(["serve", "/no/such/model"]) == 2
    assert capsys.readouterr().err.startswith(f"treadle: error: TREADLE_API_KEY: {problem}")


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "/no/such/model", "--port", str(port)]) == 2
    assert f"--port: cannot listen on 127.0.0.1:{port} (Address already in use)" in capsys.readouterr().err


@pytest.mark.parametrize("origins", ["x", "{}", "[1]", ""])
def test_origins_are_a_list(origins, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--allowed-origins", origins])
    assert "must be a JSON list of strings" in capsys.readouterr().err
