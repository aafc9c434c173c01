"""Pages and figures from saved results alone, so that any run can be drawn again later."""
