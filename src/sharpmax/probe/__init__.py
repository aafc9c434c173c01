"""What a running model looks at: row statistics captured, summed up, forecast and watched."""
