package main

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// table is text in columns that is also Markdown; all but the first are numbers.
type table [][]string

func (t *table) row(cells ...string) { *t = append(*t, cells) }

func (t table) text() string {
	widths := make([]int, len(t[0]))
	for _, row := range t {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell), 3)
		}
	}
	var b strings.Builder
	for n, row := range t {
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if i > 0 {
				cell, pad = pad, cell
			}
			b.WriteString("| " + cell + pad + " ")
		}
		b.WriteString("|\n")
		if n == 0 {
			b.WriteString(rule(widths))
		}
	}
	return b.String()
}

func rule(widths []int) string {
	var b strings.Builder
	for i, width := range widths {
		end := "-"
		if i > 0 {
			end = ":"
		}
		b.WriteString("|" + strings.Repeat("-", width+1) + end)
	}
	return b.String() + "|\n"
}

func millis(d time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/1e6) }

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
