"""What a running model looks at: row statistics captured, summed up, forecast and watched.

The modules here capture rows of attention and import none of the parts; `survey` and `watch` import nothing but them,
and `horizons` `survey` besides.
"""
