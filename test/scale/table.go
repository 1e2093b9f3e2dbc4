package main

import (
	"fmt"
	"time"
)

// millis returns a duration as a number of milliseconds, without the unit.
func millis(d time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/1e6) }

// seconds returns a duration in seconds with the unit.
func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
