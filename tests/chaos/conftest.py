from tests.integration.conftest import shop_on

__all__ = ["shop_on"]
