package driver

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/test/frozen"
)

var (
	description = regexp.MustCompile(`^Desc{fqName: "(\w+)", help: "(.*?)", .*constLabels: {(.*)}, variableLabels: {(.*)}}$`)
	labelValue  = regexp.MustCompile(`="[^"]*"`)
)

// TestMetricsTable: docs/reference/metrics.md contains the names, labels and help texts of the metrics.
func TestMetricsTable(t *testing.T) {
	m := newMetrics("", "", nil, pool.NewSet(nil, nil, nil))
	all := []*prometheus.Desc{poolUp, poolCopied, volumes, disks, copies, published, unwiped}
	for _, u := range usageGauges {
		all = append(all, u.desc)
	}
	described := make(chan *prometheus.Desc)
	go func() {
		defer close(described)
		m.registry.Describe(described)
		nodeCollector{}.Describe(described)
		workerCollector{}.Describe(described)
		nodeLossCollector{}.Describe(described)
		transferredBytes("", nil).Describe(described)
		(&trims{}).Describe(described)
		(&examiner{}).Describe(described)
		(&checks{}).Describe(described)
	}()
	for d := range described {
		all = append(all, d)
	}
	var rows []string
	for _, d := range all {
		fields := description.FindStringSubmatch(d.String())
		if fields == nil {
			t.Fatalf("got %s, want a text that matches %s", d, description)
		}
		name, help, labels := fields[1], strings.TrimSuffix(fields[2], "."), strings.Trim(labelValue.ReplaceAllString(fields[3], "")+","+fields[4], ",")
		if !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			rows = append(rows, fmt.Sprintf("| `%s` | %s | %s |\n", name, strings.ReplaceAll(labels, ",", ", "), help))
		}
	}
	slices.Sort(rows)
	frozen.Generated(t, "../docs/reference/metrics.md", "make docs-metrics", "| metric | labels | meaning |\n|---|---|---|\n"+strings.Join(rows, ""))
}
