package chart

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

var (
	quoted = regexp.MustCompile(`"[^"]*"`)
	metric = regexp.MustCompile(`\b(trivet|csi|go|process)_[a-z0-9_]+\b`)
	// suffix are the parts of a histogram.
	suffix = regexp.MustCompile(`_(bucket|count|sum)$`)
)

// TestMetrics: alerts and dashboard use metrics that docs/metrics.md has.
func TestMetrics(t *testing.T) {
	doc, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, name := range metric.FindAllString(string(doc), -1) {
		documented[name] = true
	}
	for _, e := range append(alerts(t), queries(t)...) {
		names := metric.FindAllString(quoted.ReplaceAllString(e, ""), -1)
		if len(names) == 0 {
			t.Errorf("no metric in %s", e)
		}
		for _, name := range names {
			// Of the Go runtime's metrics the document names none by itself.
			if runtime := strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_"); !runtime && !documented[suffix.ReplaceAllString(name, "")] {
				t.Errorf("docs/metrics.md has no %s, used in %s", name, e)
			}
		}
	}
}

// alerts are the expressions of the alerting rules, each of which says what is
// the matter and how bad it is.
func alerts(t *testing.T) (expressions []string) {
	t.Helper()
	b, err := os.ReadFile(chart + "/files/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr         string
				Labels, Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			expressions = append(expressions, r.Expr)
			if r.Alert == "" || r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
				t.Errorf("alert %q lacks its name, severity, summary or description", r.Alert)
			}
		}
	}
	return expressions
}

// queries are the expressions of the dashboard.
func queries(t *testing.T) (expressions []string) {
	t.Helper()
	b, err := os.ReadFile(chart + "/files/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Panels []struct {
			ID      int
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
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
