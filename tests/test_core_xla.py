"""The base suite on the XLA path."""

from base import CoreSuite


class TestXla(CoreSuite):
    implementation = "xla"
