package sanity

import (
	"regexp"
	"testing"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
)

// skips are the specs that may be left out, and why. Each row must account for
// at least one spec of every kind, so none outlives its reason.
var skips = []struct {
	spec   *regexp.Regexp
	reason string
}{
	{
		regexp.MustCompile(`ListVolumes pagination should detect`),
		"csi-sanity itself has switched it off",
	},
	{
		regexp.MustCompile(`(Create|Delete|Get|List)Snapshots? \[Controller Server\]|CreateVolume .*source snapshot`),
		"the driver has no snapshots yet",
	},
	{
		regexp.MustCompile(`CreateVolume .*source volume`),
		"the driver has no clones yet",
	},
	{
		regexp.MustCompile(`ModifyVolume \[Controller Server\]|volume attribute class`),
		"a volume has no parameter that could be changed later",
	},
	{
		regexp.MustCompile(`GroupController Service`),
		"the driver has no group snapshots yet",
	},
}

// checkSkips fails the test for specs that were left out without a reason, for
// reasons that nothing was left out for, and if no spec ran at all.
func checkSkips(t *testing.T, report ginkgo.Report, kinds int) {
	t.Helper()
	used := make([]int, len(skips))
	passed := 0
	for _, spec := range report.SpecReports {
		switch {
		case spec.LeafNodeType != types.NodeTypeIt:
		case spec.State.Is(types.SpecStatePassed):
			passed++
		case spec.State.Is(types.SpecStateSkipped | types.SpecStatePending):
			if row := rowFor(spec.FullText()); row >= 0 {
				used[row]++
			} else {
				t.Errorf("left out without a known reason: %s (%s)", spec.FullText(), spec.FailureMessage())
			}
		}
	}
	for i, n := range used {
		if n < kinds {
			t.Errorf("skip %q accounts for %d specs of %d kinds: remove or narrow it", skips[i].spec, n, kinds)
		}
	}
	if passed == 0 {
		t.Error("no spec ran")
	}
	t.Logf("%d specs passed", passed)
}

func rowFor(text string) int {
	for i, s := range skips {
		if s.spec.MatchString(text) {
			return i
		}
	}
	return -1
}
