import pytest


@pytest.fixture
def write(tmp_path):
    """Writes a file, and returns its path."""

    def write(data: bytes, name="tokens.bin"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    return write
