package main

import (
	"fmt"
	"time"
)

// micros returns a duration as a number of µs, without the unit.
func micros(d time.Duration) string { return fmt.Sprintf("%.0f", float64(d)/1e3) }

// millis returns a duration in ms with the unit.
func millis(d time.Duration) string {
	if d >= 100*time.Millisecond {
		return fmt.Sprintf("%.0f ms", float64(d)/1e6)
	}
	return fmt.Sprintf("%.1f ms", float64(d)/1e6)
}

// times returns a ratio with two decimals.
func times(ratio float64) string { return fmt.Sprintf("%.2f", ratio) }

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/mib) }

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
