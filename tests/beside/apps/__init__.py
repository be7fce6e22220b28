"""The apps of the tests beside other packages: each takes its settings from the variable TEST_CONF."""
