from built_site import site  # noqa: F401
