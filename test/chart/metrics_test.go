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

	"github.com/trivet-csi/trivet/internal/testenv"
)

var (
	quoted = regexp.MustCompile(`"[^"]*"`)
	metric = regexp.MustCompile(`\b(?:trivet|csi|go|process)_[a-z0-9_]+\b`)
	// suffix matches the suffixes of a histogram.
	suffix = regexp.MustCompile(`_(bucket|count|sum)$`)
)

// TestMetrics: alerts and dashboard use only metrics in docs/metrics.md.
func TestMetrics(t *testing.T) {
	documented := matches(read(t, "../../docs/metrics.md"), metric)
	for _, e := range append(alerts(t), queries(t)...) {
		used := matches(quoted.ReplaceAllString(e, ""), metric)
		if len(used) == 0 {
			t.Errorf("no metric in %s", e)
		}
		for name := range used {
			// The document does not list the metrics of the Go runtime.
			if runtime := strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_"); !runtime && !documented[suffix.ReplaceAllString(name, "")] {
				t.Errorf("docs/metrics.md has no %s, used in %s", name, e)
			}
		}
	}
}

// TestMetricsDocumented: docs/metrics.md has a row for each metric of the code, and no others.
func TestMetricsDocumented(t *testing.T) {
	code := map[string]bool{}
	for _, source := range sources(t, "driver", "volumemanager") {
		maps.Copy(code, matches(source, regexp.MustCompile(`"((?:trivet|csi_plugin|volume_manager)_[a-z_]+[a-z])"`)))
		for pool := range matches(source, regexp.MustCompile(`poolDesc\("([a-z_]+)"`)) {
			code["trivet_pool_"+pool] = true
		}
	}
	rows := matches(tableRows(read(t, "../../docs/metrics.md")), regexp.MustCompile("`((?:trivet|csi_plugin|volume_manager)_[a-z_]+)`"))
	sameNames(t, "metrics", code, rows)
}

// TestReasonsDocumented: docs/metrics.md has a row for each reason of a health condition,
// and no others. Conditions use the constants.
func TestReasonsDocumented(t *testing.T) {
	code := matches(read(t, "../../backend/reason.go"), regexp.MustCompile(`Reason = "(\w+)"`))
	_, health, _ := strings.Cut(read(t, "../../docs/metrics.md"), "## Health of volumes")
	sameNames(t, "reasons", code, matches(tableRows(health), regexp.MustCompile("`([A-Z][A-Za-z]+)`")))
	for _, source := range sources(t, "backend", "nodeserver", "controllerserver", "export", "cluster/router") {
		for literal := range matches(source, regexp.MustCompile(`Reason: +"(\w+)"`)) {
			t.Errorf("the reason %s is not a constant of backend/reason.go", literal)
		}
	}
}

// tableRows returns the first cells of all tables.
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

func sameNames(t *testing.T, what string, code, docs map[string]bool) {
	t.Helper()
	if len(code) == 0 || !maps.Equal(code, docs) {
		t.Errorf("%s of the code:\n%q\nof docs/metrics.md:\n%q", what, slices.Sorted(maps.Keys(code)), slices.Sorted(maps.Keys(docs)))
	}
}

// matches returns all matches in a text, or their first groups.
func matches(text string, pattern *regexp.Regexp) map[string]bool {
	found := map[string]bool{}
	for _, match := range pattern.FindAllStringSubmatch(text, -1) {
		found[match[min(1, pattern.NumSubexp())]] = true
	}
	return found
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}

// sources returns the Go files of folders, without tests.
func sources(t *testing.T, folders ...string) (texts []string) {
	t.Helper()
	for _, folder := range folders {
		err := filepath.WalkDir("../../"+folder, func(path string, _ fs.DirEntry, err error) error {
			if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
				texts = append(texts, read(t, path))
			}
			return err
		})
		must(t, err)
	}
	return texts
}

// TestAlertRules: promtool accepts the rules, and testdata/alerts_test.yaml has cases for each.
func TestAlertRules(t *testing.T) {
	testenv.Require(t, "promtool")
	const cases = "testdata/alerts_test.yaml"
	for _, args := range [][]string{{"check", "rules", chart + "/files/alerts.yaml"}, {"test", "rules", cases}} {
		if out, err := exec.Command("../../bin/promtool", args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %q: %v (`make bin/promtool` fetches it)\n%s", args, err, out)
		}
	}
	tested := matches(read(t, cases), regexp.MustCompile(`name: (\w+)\n`))
	for _, r := range alertRules(t) {
		if !tested[r.Alert] {
			t.Errorf("%s has no case for %s", cases, r.Alert)
		}
	}
}

// TestRunbooks: docs/alerts.md has a section for each alert, which links to it, and no others.
func TestRunbooks(t *testing.T) {
	sections := matches(read(t, "../../docs/alerts.md"), regexp.MustCompile(`(?m)^## (\w+)$`))
	alerted := map[string]bool{}
	for _, r := range alertRules(t) {
		alerted[r.Alert] = true
		if link := "https://github.com/trivet-csi/trivet/blob/main/docs/alerts.md#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != link {
			t.Errorf("%s has the runbook_url %q, want %s", r.Alert, r.Annotations["runbook_url"], link)
		}
	}
	if !maps.Equal(sections, alerted) {
		t.Errorf("alerts: %q; sections of docs/alerts.md: %q", slices.Sorted(maps.Keys(alerted)), slices.Sorted(maps.Keys(sections)))
	}
}

// TestAlertsCover: the alerts use each metric for which docs/metrics.md advises an alert, and the
// dashboard shows each family of metrics.
func TestAlertsCover(t *testing.T) {
	expressions := strings.Join(alerts(t), "\n")
	for line := range strings.Lines(read(t, "../../docs/metrics.md")) {
		if !strings.HasPrefix(line, "| `trivet_") || !strings.Contains(line, "; alert ") {
			continue
		}
		if name := metric.FindString(line); !strings.Contains(expressions, name) {
			t.Errorf("docs/metrics.md advises an alert on %s, and there is none", name)
		}
	}
	shown := strings.Join(queries(t), "\n")
	for _, family := range []string{"trivet_pool_", "trivet_volumes", "trivet_disks", "trivet_nfs_", "trivet_pool_snapshots", "trivet_pool_copies", "trivet_pool_trash_", "trivet_node_"} {
		if !strings.Contains(shown, family) {
			t.Errorf("the dashboard shows no %s", family)
		}
	}
}

// rule is an alerting rule.
type rule struct {
	Alert, Expr         string
	Labels, Annotations map[string]string
}

func alertRules(t *testing.T) (all []rule) {
	t.Helper()
	var file struct{ Groups []struct{ Rules []rule } }
	must(t, yaml.Unmarshal([]byte(read(t, chart+"/files/alerts.yaml")), &file))
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// alerts returns the expressions of the alerting rules. Each rule has a severity and a description.
func alerts(t *testing.T) (expressions []string) {
	t.Helper()
	for _, r := range alertRules(t) {
		expressions = append(expressions, r.Expr)
		if r.Alert == "" || r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("alert %q lacks its name, severity, summary or description", r.Alert)
		}
	}
	return expressions
}

// queries returns the expressions of the dashboard.
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
			t.Errorf("two panels have the ID %d", p.ID)
		}
		seen[p.ID] = true
		for _, target := range p.Targets {
			expressions = append(expressions, target.Expr)
		}
	}
	return expressions
}
