package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"sigs.k8s.io/yaml"
)

// The formats of --output.
const (
	tableFormat = "table"
	wideFormat  = "wide"
	jsonFormat  = "json"
	yamlFormat  = "yaml"
)

// output writes the result of a command in the format of --output.
type output struct {
	format string
	cmd    *cobra.Command
}

// outputFlag adds --output to a command.
func outputFlag(cmd *cobra.Command) *output {
	o := &output{cmd: cmd}
	choiceFlag(cmd, &o.format, "output", "o", "`format` of the output", tableFormat, wideFormat, jsonFormat, yamlFormat)
	return o
}

func (o *output) isWide() bool { return o.format == wideFormat }

// write writes a value as JSON or YAML, or as its tables. Of several tables it omits those without rows.
func (o *output) write(value any, tables ...table) error {
	w := o.cmd.OutOrStdout()
	switch o.format {
	case jsonFormat:
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(value)
	case yamlFormat:
		b, err := yaml.Marshal(value)
		if err == nil {
			_, err = w.Write(b)
		}
		return err
	}
	return writeTables(w, tables, o.isWide(), hasColors(w))
}

// color is an escape sequence. All colors have the same length, because tabwriter counts their characters.
type color string

const (
	noColor color = "\x1b[39m"
	red     color = "\x1b[31m"
	green   color = "\x1b[32m"
	yellow  color = "\x1b[33m"

	colorEnd = "\x1b[0m"
)

// hasColors reports whether w is a terminal that shows colors, and the user has not disabled them (no-color.org).
func hasColors(w io.Writer) bool { return isTerminal(w) && os.Getenv("NO_COLOR") == "" }

// isTerminal reports whether w is a terminal that interprets escape sequences.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
}

// column is a column of a table of values.
type column[T any] struct {
	name string
	wide bool // only wide output contains the column
	cell func(T) string
	// color is the color of the cell; nil: the column has no colors.
	color func(T) color
}

// table is the text of a table.
type table struct {
	columns []tableColumn
	rows    int
	// noHeader omits the header, for tables that scripts read.
	noHeader bool
}

type tableColumn struct {
	name    string
	wide    bool
	cells   []string
	colors  []color
	colored bool
}

// newTable returns a table with a row for each value.
func newTable[T any](values []T, columns ...column[T]) table {
	t := table{rows: len(values)}
	for _, c := range columns {
		text := tableColumn{name: c.name, wide: c.wide, colored: c.color != nil}
		for _, v := range values {
			text.cells = append(text.cells, printable(c.cell(v)))
			if c.color != nil {
				text.colors = append(text.colors, c.color(v))
			}
		}
		t.columns = append(t.columns, text)
	}
	return t
}

// writeTables writes tables, with an empty line between them.
func writeTables(w io.Writer, tables []table, wide, colors bool) error {
	var texts []string
	for _, t := range tables {
		if t.rows == 0 && len(tables) > 1 {
			continue
		}
		var b strings.Builder
		if err := t.write(&b, wide, colors); err != nil {
			return err
		}
		texts = append(texts, b.String())
	}
	_, err := io.WriteString(w, strings.Join(texts, "\n"))
	return err
}

func (t table) write(w io.Writer, wide, colors bool) error {
	aligned := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if !t.noHeader {
		fmt.Fprintln(aligned, strings.Join(t.line(wide, colors, tableColumn.header), "\t"))
	}
	for i := range t.rows {
		cell := func(c tableColumn, colors bool) string { return c.cell(i, colors) }
		fmt.Fprintln(aligned, strings.Join(t.line(wide, colors, cell), "\t"))
	}
	return aligned.Flush()
}

// line returns the cells of a line.
func (t table) line(wide, colors bool, cell func(c tableColumn, colors bool) string) (cells []string) {
	for _, c := range t.columns {
		if wide || !c.wide {
			cells = append(cells, cell(c, colors))
		}
	}
	return cells
}

func (c tableColumn) header(colors bool) string { return c.paint(c.name, noColor, colors) }

func (c tableColumn) cell(row int, colors bool) string {
	if !c.colored {
		return c.cells[row]
	}
	return c.paint(c.cells[row], c.colors[row], colors)
}

func (c tableColumn) paint(text string, with color, colors bool) string {
	if !colors || !c.colored {
		return text
	}
	return string(cmp.Or(with, noColor)) + text + colorEnd
}

// printable replaces unprintable characters, which in the names of volumes could move the cursor or break the
// table.
func printable(cell string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, cell)
}
