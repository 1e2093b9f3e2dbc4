package chart

import (
	"encoding/json"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/testenv"
)

var (
	// quoted matches the values of labels in an expression.
	quoted = regexp.MustCompile(`"[^"]*"`)
	metric = regexp.MustCompile(`\b(?:trivet|csi|go|process)_[a-z0-9_]+\b`)
	// suffix matches what the names of a histogram's series have in addition to the documented name.
	suffix = regexp.MustCompile(`_(bucket|count|sum)$`)
)

// TestMetrics checks that docs/reference/metrics.md contains the metrics of the alerts and the dashboard.
func TestMetrics(t *testing.T) {
	documented := matches(read(t, "../../docs/reference/metrics.md"), metric)
	for _, e := range append(alerts(t), queries(t)...) {
		used := matches(quoted.ReplaceAllString(e, ""), metric)
		if len(used) == 0 {
			t.Errorf("got no metric in the expression %s", e)
		}
		for name := range used {
			// docs/reference/metrics.md does not list the metrics of the Go runtime.
			if runtime := strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_"); !runtime && !documented[suffix.ReplaceAllString(name, "")] {
				t.Errorf("docs/reference/metrics.md does not contain %s, which is used in %s", name, e)
			}
		}
	}
}

// TestMetricsDocumented checks that docs/reference/metrics.md has a row for each metric of the code, and no others.
func TestMetricsDocumented(t *testing.T) {
	code := map[string]bool{}
	for _, source := range sources(t, "driver", "volumemanager") {
		maps.Copy(code, matches(source, regexp.MustCompile(`"((?:trivet|csi_plugin|volume_manager)_[a-z_]+[a-z])"`)))
		for pool := range matches(source, regexp.MustCompile(`poolDesc\("([a-z_]+)"`)) {
			code["trivet_pool_"+pool] = true
		}
	}
	rows := matches(tableRows(read(t, "../../docs/reference/metrics.md")), regexp.MustCompile("`((?:trivet|csi_plugin|volume_manager)_[a-z_]+)`"))
	sameNames(t, "metrics", code, rows)
}

// TestReasonsDocumented checks that docs/reference/metrics.md has a row for each reason of a health condition, and
// no others, and that the code uses constants for the reasons.
func TestReasonsDocumented(t *testing.T) {
	code := matches(read(t, "../../backend/reason.go"), regexp.MustCompile(`Reason = "(\w+)"`))
	_, health, _ := strings.Cut(read(t, "../../docs/reference/metrics.md"), "## Health of volumes")
	sameNames(t, "reasons", code, matches(tableRows(health), regexp.MustCompile("`([A-Z][A-Za-z]+)`")))
	for reason := range code {
		if !backend.Reason(reason).Known() {
			t.Errorf("the controller ignores the reason %s, because the list in backend/reason.go lacks it", reason)
		}
	}
	for _, source := range sources(t, "backend", "nodeserver", "controllerserver", "export", "cluster/router") {
		for literal := range matches(source, regexp.MustCompile(`Reason: +"(\w+)"`)) {
			t.Errorf("the reason %s is a literal: declare a constant in backend/reason.go", literal)
		}
	}
}

// tableRows returns the first cell of each table row that begins with a name in backquotes, one per line.
func tableRows(markdown string) string {
	var cells []string
	for line := range strings.Lines(markdown) {
		if cell, isRow := strings.CutPrefix(line, "| `"); isRow {
			first, _, _ := strings.Cut(cell, "|")
			cells = append(cells, "`"+first)
		}
	}
	return strings.Join(cells, "\n")
}

// sameNames fails unless the code and docs/reference/metrics.md contain the same names.
func sameNames(t *testing.T, what string, code, docs map[string]bool) {
	t.Helper()
	if len(code) == 0 || !maps.Equal(code, docs) {
		t.Errorf("%s: got in the code:\n%q\nin docs/reference/metrics.md:\n%q\nwant equal names", what, slices.Sorted(maps.Keys(code)), slices.Sorted(maps.Keys(docs)))
	}
}

// matches returns all matches of a pattern in a text, or their first groups if the pattern has groups.
func matches(text string, pattern *regexp.Regexp) map[string]bool {
	found := map[string]bool{}
	for _, match := range pattern.FindAllStringSubmatch(text, -1) {
		found[match[min(1, pattern.NumSubexp())]] = true
	}
	return found
}

// read returns the content of a file.
func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}

// sources returns the contents of the Go files below some directories, without tests.
func sources(t *testing.T, dirs ...string) (texts []string) {
	t.Helper()
	for _, dir := range dirs {
		err := filepath.WalkDir("../../"+dir, func(path string, _ fs.DirEntry, err error) error {
			if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
				texts = append(texts, read(t, path))
			}
			return err
		})
		must(t, err)
	}
	return texts
}

// TestAlertRules checks that promtool accepts the alerting rules, that the cases of
// testdata/alerts_test.yaml pass, and that each rule has a case.
func TestAlertRules(t *testing.T) {
	testenv.Require(t, "promtool")
	const cases = "testdata/alerts_test.yaml"
	for _, args := range [][]string{{"check", "rules", chart + "/files/alerts.yaml"}, {"test", "rules", cases}} {
		if out, err := exec.Command("../../bin/promtool", args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %q: %v (if promtool is missing, run `make bin/promtool`)\n%s", args, err, out)
		}
	}
	tested := matches(read(t, cases), regexp.MustCompile(`name: (\w+)\n`))
	for _, r := range alertRules(t) {
		if !tested[r.Alert] {
			t.Errorf("%s has no case for the alert %s", cases, r.Alert)
		}
	}
}

// TestRunbooks checks that docs/reference/alerts.md has a section for each alert, and no others, and that each alert
// links to its section.
func TestRunbooks(t *testing.T) {
	sections := matches(read(t, "../../docs/reference/alerts.md"), regexp.MustCompile(`(?m)^## (\w+)$`))
	alerted := map[string]bool{}
	for _, r := range alertRules(t) {
		alerted[r.Alert] = true
		if link := "https://github.com/trivet-csi/trivet/blob/main/docs/reference/alerts.md#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != link {
			t.Errorf("%s: got runbook_url %q, want %q", r.Alert, r.Annotations["runbook_url"], link)
		}
	}
	if !maps.Equal(sections, alerted) {
		t.Errorf("got alerts %q and sections %q of docs/reference/alerts.md, want equal names", slices.Sorted(maps.Keys(alerted)), slices.Sorted(maps.Keys(sections)))
	}
}

// TestAlertsCover checks that the alerts use each metric for which docs/reference/metrics.md advises an alert, and
// that the dashboard shows each family of metrics. The chart does not install the volume manager.
func TestAlertsCover(t *testing.T) {
	expressions := strings.Join(alerts(t), "\n")
	for line := range strings.Lines(read(t, "../../docs/reference/metrics.md")) {
		if !strings.HasPrefix(line, "| `trivet_") || strings.HasPrefix(line, "| `trivet_volume_manager_") || !strings.Contains(line, "; alert ") {
			continue
		}
		if name := metric.FindString(line); !strings.Contains(expressions, name) {
			t.Errorf("docs/reference/metrics.md advises an alert on %s, but no alert uses it", name)
		}
	}
	shown := strings.Join(queries(t), "\n")
	for _, family := range []string{"trivet_pool_", "trivet_volumes", "trivet_disks", "trivet_nfs_", "trivet_pool_snapshots", "trivet_pool_copies", "trivet_pool_trash_", "trivet_node_"} {
		if !strings.Contains(shown, family) {
			t.Errorf("the dashboard shows no metric %s…", family)
		}
	}
}

// rule is an alerting rule.
type rule struct {
	Alert, Expr         string
	Labels, Annotations map[string]string
}

// alertRules returns the alerting rules of the chart.
func alertRules(t *testing.T) (all []rule) {
	t.Helper()
	var file struct{ Groups []struct{ Rules []rule } }
	must(t, yaml.Unmarshal([]byte(read(t, chart+"/files/alerts.yaml")), &file))
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// alerts returns the expressions of the alerting rules. It fails for rules without a severity, a summary
// or a description.
func alerts(t *testing.T) (expressions []string) {
	t.Helper()
	for _, r := range alertRules(t) {
		expressions = append(expressions, r.Expr)
		if r.Alert == "" || r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("alert %q has no name, severity, summary or description", r.Alert)
		}
	}
	return expressions
}

// queries returns the expressions of the dashboard's panels.
func queries(t *testing.T) (expressions []string) {
	t.Helper()
	var file struct {
		Panels []struct {
			ID      int
			Targets []struct{ Expr string }
		}
	}
	must(t, json.Unmarshal([]byte(read(t, chart+"/files/dashboard.json")), &file))
	seen := map[int]bool{}
	for _, p := range file.Panels {
		if seen[p.ID] {
			t.Errorf("two panels of the dashboard have the ID %d", p.ID)
		}
		seen[p.ID] = true
		for _, target := range p.Targets {
			expressions = append(expressions, target.Expr)
		}
	}
	return expressions
}
