package sanity

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// skip describes specs that do not run for some kinds.
type skip struct {
	spec   *regexp.Regexp
	reason string
	// applies selects the kinds; nil selects all.
	applies func(kind) bool
	// exclude is true for specs that csi-sanity would not skip by itself.
	exclude bool
}

// skips contains the specs that may be skipped. Each row must match at least one skipped spec for
// each of its kinds, so that outdated rows are noticed.
var skips = []skip{
	{
		spec:   regexp.MustCompile(`ListVolumes pagination should detect`),
		reason: "csi-sanity itself marks the spec as pending",
	},
	{
		spec:   regexp.MustCompile(`CreateSnapshot .*with accessibility requirements`),
		reason: "a snapshot is always stored with its volume, and the driver accepts no other topology",
	},
	{
		spec: regexp.MustCompile(`source snapshot$|(List|Get)Snapshots? .*(snapshots? that match|new snapshots|next token)` +
			`|DeleteSnapshot .*appropriate values|CreateSnapshot .*(existing name|maximum-length)`),
		reason:  "the kind has no snapshots; the driver advertises the capability because of other kinds",
		applies: func(k kind) bool { return !k.Has(backendtest.Snapshots) }, exclude: true,
	},
	{
		spec:    regexp.MustCompile(`CreateVolume .*(existing source volume|source volume is not found)`),
		reason:  "the kind has no clones; the driver advertises the capability because of other kinds",
		applies: func(k kind) bool { return !k.Has(backendtest.Clones) }, exclude: true,
	},
	{
		spec:    regexp.MustCompile(`created with(out)? a volume attribute class|should create volume with.* volume attribute class`),
		reason:  "the volumes of the kind have no limits; the driver advertises the capability because of other kinds",
		applies: func(k kind) bool { return !k.Has(backendtest.Device | backendtest.NodeLocal) }, exclude: true,
	},
	{
		spec:    regexp.MustCompile(`published but is incompatible|node max attach limit`),
		reason:  "the publication of a node's volume is not recorded; the orchestrator enforces the limit of NodeGetInfo",
		applies: func(k kind) bool { return k.forwarded },
	},
	{
		spec:    regexp.MustCompile(`node max attach limit`),
		reason:  "the volumes of a shared pool on a node are not counted; the orchestrator enforces the limit of NodeGetInfo",
		applies: func(k kind) bool { return k.Has(backendtest.Shared) },
	},
	{
		spec:   regexp.MustCompile(`should work if node-expand is called after node-publish`),
		reason: "the volume is expanded before it is staged, and its ext4 exists since its creation; test/vm grows it",
		applies: func(k kind) bool {
			return k.FSType == "ext4" && k.Has(backendtest.Image|backendtest.NodeLocal) && testenv.IsWithout("ext4-growth")
		},
		exclude: true,
	},
}

// appliesTo reports whether the kind is one of the row's kinds.
func (s skip) appliesTo(k kind) bool { return s.applies == nil || s.applies(k) }

// excludedSpecs returns the ginkgo patterns of the specs to exclude.
func excludedSpecs(selected []kind) (patterns []string) {
	for _, s := range skips {
		for _, k := range selected {
			if s.exclude && s.appliesTo(k) {
				patterns = append(patterns, " "+k.name+" .*("+s.spec.String()+")")
			}
		}
	}
	return patterns
}

// checkSkips fails the test for each skipped spec that no row matches, for each row that matches too
// few specs, and if no spec passed.
func checkSkips(t *testing.T, report ginkgo.Report, selected []kind) {
	t.Helper()
	used := make([]int, len(skips))
	passed := 0
	for _, spec := range report.SpecReports {
		switch {
		case spec.LeafNodeType != types.NodeTypeIt:
		case spec.State.Is(types.SpecStatePassed):
			passed++
		case spec.State.Is(types.SpecStateSkipped | types.SpecStatePending):
			if row := rowFor(spec, selected); row >= 0 {
				used[row]++
			} else {
				t.Errorf("a spec was skipped that is not in the table of skips: %s (%s)", spec.FullText(), spec.FailureMessage())
			}
		}
	}
	for i, n := range used {
		kinds := len(slices.DeleteFunc(slices.Clone(selected), func(k kind) bool { return !skips[i].appliesTo(k) }))
		if n < kinds {
			t.Errorf("skip %q: got %d skipped specs, want at least 1 for each of %d kinds: remove or narrow it", skips[i].spec, n, kinds)
		}
	}
	if passed == 0 {
		t.Error("no spec passed")
	}
	t.Logf("%d specs passed", passed)
}

// rowFor returns the index of the row of skips that matches a spec, or -1.
func rowFor(spec types.SpecReport, selected []kind) int {
	i := slices.IndexFunc(selected, func(k kind) bool { return strings.HasPrefix(spec.FullText(), k.name+" ") })
	if i < 0 {
		return -1
	}
	return slices.IndexFunc(skips, func(s skip) bool {
		return s.spec.MatchString(spec.FullText()) && s.appliesTo(selected[i])
	})
}
