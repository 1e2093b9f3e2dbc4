//go:build vm

package nfs

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/status"
)

var tableFile = flag.String("table", "", "`file` that TestOutage writes its table for docs/nfs.md to")

// table is what each call answered in each kind of trouble, and how soon.
type table struct {
	mu      sync.Mutex
	columns []string
	rows    []string
	cells   map[[2]string]string
}

// set enters a text; rows stand in the order of their first entry.
func (t *table) set(row, column, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	known := false
	for _, r := range t.rows {
		known = known || r == row
	}
	if !known {
		t.rows = append(t.rows, row)
	}
	if t.cells == nil {
		t.cells = map[[2]string]string{}
	}
	t.cells[[2]string{row, column}] = text
}

// measure makes a call and enters its answer.
func (t *table) measure(row, column string, call func() error) error {
	begin := time.Now()
	err := call()
	t.set(row, column, fmt.Sprintf("%s, %s", status.Code(err), short(time.Since(begin))))
	return err
}

// short is a duration for readers.
func short(d time.Duration) string {
	if d < time.Second {
		return d.Round(time.Millisecond).String()
	}
	return d.Round(100 * time.Millisecond).String()
}

func (t *table) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "| | %s |\n|---%s|\n", strings.Join(t.columns, " | "), strings.Repeat("|---", len(t.columns)))
	for _, r := range t.rows {
		fmt.Fprintf(&b, "| %s |", r)
		for _, c := range t.columns {
			fmt.Fprintf(&b, " %s |", t.cells[[2]string{r, c}])
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// show logs the table, and writes it if somebody asked for that.
func (t *table) show(tb testing.TB) {
	tb.Helper()
	tb.Logf("\n%s", t)
	if *tableFile == "" {
		return
	}
	if err := os.WriteFile(*tableFile, []byte(t.String()), 0o644); err != nil {
		tb.Error(err)
	}
}
