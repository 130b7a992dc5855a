"""Python processes of the tests reach this machine only. conftest.py runs this and puts its folder on PYTHONPATH."""

import errno
import ipaddress
import socket

HERE = {None, "", "localhost", socket.gethostname(), socket.gethostname().encode(), b"localhost", b""}


def is_here(host):
    if host in HERE:
        return True
    try:
        address = ipaddress.ip_address((host.decode() if isinstance(host, bytes) else host).partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def guard(name):
    real = getattr(socket.socket, name)

    def only_here(self, *given):
        address = given[-1]
        if self.family in (socket.AF_INET, socket.AF_INET6) and isinstance(address, tuple) and not is_here(address[0]):
            raise OSError(errno.ENETUNREACH, f"the tests are offline: {address[0]}")
        return real(self, *given)

    setattr(socket.socket, name, only_here)


def resolve_here(*given, real=socket.getaddrinfo, **options):
    host = options.get("host", given[0] if given else None)
    if not is_here(host):
        raise socket.gaierror(socket.EAI_NONAME, f"the tests are offline: {host}")
    return real(*given, **options)


if not hasattr(socket, "offline"):  # the folder may be on the path twice
    socket.offline = True
    for name in ("connect", "connect_ex", "sendto"):
        guard(name)
    socket.getaddrinfo = resolve_here
