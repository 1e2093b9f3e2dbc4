//go:build vm

package nfs

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/test/markdown"
)

var tableFile = flag.String("table", "", "`file` to which TestOutage writes its table")

// table contains the result and the duration of each call (row) in each phase (column).
type table struct {
	mu      sync.Mutex
	columns []string
	rows    []string
	cells   map[[2]string]string
}

// set sets a cell. The rows have the order in which they were first set.
func (t *table) set(row, column, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.Contains(t.rows, row) {
		t.rows = append(t.rows, row)
	}
	if t.cells == nil {
		t.cells = map[[2]string]string{}
	}
	t.cells[[2]string{row, column}] = text
}

// measure makes a call and sets its cell to the result and the duration.
func (t *table) measure(row, column string, call func() error) error {
	begin := time.Now()
	err := call()
	t.set(row, column, fmt.Sprintf("%s, %s", status.Code(err), rounded(time.Since(begin))))
	return err
}

// rounded returns a duration in milliseconds, or from a second on with one decimal.
func rounded(d time.Duration) string {
	if d < time.Second {
		return d.Round(time.Millisecond).String()
	}
	return d.Round(100 * time.Millisecond).String()
}

func (t *table) String() string {
	text := markdown.Table{append([]string{""}, t.columns...)}
	for _, r := range t.rows {
		cells := []string{r}
		for _, c := range t.columns {
			cells = append(cells, t.cells[[2]string{r, c}])
		}
		text.Row(cells...)
	}
	return text.Text(false)
}

// show logs the table and writes it to tableFile.
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
