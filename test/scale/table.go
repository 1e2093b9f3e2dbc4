package main

import (
	"fmt"
	"time"
)

func millis(d time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/1e6) }

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
