"""The browser, for all tests of pages."""

from browser import browser

__all__ = ["browser"]
