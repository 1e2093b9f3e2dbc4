package sanity

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"

	"github.com/trivet-csi/trivet/backend/backendtest"
)

type skip struct {
	spec   *regexp.Regexp
	reason string
	// about selects the kinds of the row; nil: all.
	about func(kind) bool
	// keep: the spec would run and is excluded.
	keep bool
}

// skips are the specs that may be left out, with the reason. A row must account for at least
// one spec of each of its kinds, so that no row outlives its reason.
var skips = []skip{
	{
		spec:   regexp.MustCompile(`ListVolumes pagination should detect`),
		reason: "csi-sanity itself has switched it off",
	},
	{
		spec:   regexp.MustCompile(`CreateSnapshot .*with accessibility requirements`),
		reason: "a snapshot is where its volume is, and nowhere else can be asked for",
	},
	{
		spec: regexp.MustCompile(`source snapshot$|(List|Get)Snapshots? .*(snapshots? that match|new snapshots|next token)` +
			`|DeleteSnapshot .*appropriate values|CreateSnapshot .*(existing name|maximum-length)`),
		reason: "the kind has no snapshots; the driver advertises them for other kinds",
		about:  func(k kind) bool { return !k.Has(backendtest.Snapshots) }, keep: true,
	},
	{
		spec:   regexp.MustCompile(`CreateVolume .*(existing source volume|source volume is not found)`),
		reason: "the kind makes no volume of another; the driver advertises that for other kinds",
		about:  func(k kind) bool { return !k.Has(backendtest.Clones) }, keep: true,
	},
	{
		spec:   regexp.MustCompile(`ModifyVolume \[Controller Server\]|volume attribute class`),
		reason: "a volume has no parameter that could be changed later",
	},
	{
		spec:   regexp.MustCompile(`published but is incompatible|node max attach limit`),
		reason: "where a volume of a node is published is recorded nowhere; the orchestrator counts volumes by NodeGetInfo",
		about:  func(k kind) bool { return k.forwarded },
	},
	{
		spec:   regexp.MustCompile(`node max attach limit`),
		reason: "how many volumes of a shared pool a node has is not counted; the orchestrator counts them by NodeGetInfo",
		about:  func(k kind) bool { return k.Has(backendtest.Shared) },
	},
}

// concerns reports whether a row applies to a kind.
func (s skip) concerns(k kind) bool { return s.about == nil || s.about(k) }

// keptOut are the ginkgo patterns of the specs that must be excluded.
func keptOut(selected []kind) (patterns []string) {
	for _, s := range skips {
		for _, k := range selected {
			if s.keep && s.concerns(k) {
				patterns = append(patterns, " "+k.name+" .*("+s.spec.String()+")")
			}
		}
	}
	return patterns
}

// checkSkips fails the test for a spec that was left out without a reason, for a reason
// without a spec, and if no spec ran.
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
				t.Errorf("left out without a known reason: %s (%s)", spec.FullText(), spec.FailureMessage())
			}
		}
	}
	for i, n := range used {
		kinds := len(slices.DeleteFunc(slices.Clone(selected), func(k kind) bool { return !skips[i].concerns(k) }))
		if n < kinds {
			t.Errorf("skip %q accounts for %d specs of %d kinds: remove or narrow it", skips[i].spec, n, kinds)
		}
	}
	if passed == 0 {
		t.Error("no spec ran")
	}
	t.Logf("%d specs passed", passed)
}

func rowFor(spec types.SpecReport, selected []kind) int {
	of := slices.IndexFunc(selected, func(k kind) bool { return strings.HasPrefix(spec.FullText(), k.name+" ") })
	return slices.IndexFunc(skips, func(s skip) bool {
		return s.spec.MatchString(spec.FullText()) && of >= 0 && s.concerns(selected[of])
	})
}
