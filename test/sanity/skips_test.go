package sanity

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
)

type skip struct {
	spec   *regexp.Regexp
	reason string
	// ground: only on those that begin so; empty: on all.
	ground string
	// keep: csi-sanity does not leave it out by itself.
	keep bool
}

// skips are the specs that may be left out, and why. Each row must account for
// at least one spec of every kind that it is about, so none outlives its reason.
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
		reason: "whole disks have no snapshots, as other volumes of this driver have",
		ground: wholeDisks, keep: true,
	},
	{
		spec:   regexp.MustCompile(`ModifyVolume \[Controller Server\]|volume attribute class`),
		reason: "a volume has no parameter that could be changed later",
	},
	{
		spec:   regexp.MustCompile(`published but is incompatible|node max attach limit`),
		reason: "where a volume of a node is published is recorded nowhere; the orchestrator counts volumes by NodeGetInfo",
		ground: forwarded,
	},
	{
		spec:   regexp.MustCompile(`node max attach limit`),
		reason: "how many volumes of a shared pool a node has is not counted; the orchestrator counts them by NodeGetInfo",
		ground: onExport,
	},
}

// keptOut are the specs, as ginkgo selects them, that would run if they were not named.
func keptOut() (patterns []string) {
	for _, s := range skips {
		if s.keep {
			patterns = append(patterns, " "+s.ground+"[^ ]* .*("+s.spec.String()+")")
		}
	}
	return patterns
}

// checkSkips fails the test for specs that were left out without a reason, for
// reasons that nothing was left out for, and if no spec ran at all.
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
			if row := rowFor(spec); row >= 0 {
				used[row]++
			} else {
				t.Errorf("left out without a known reason: %s (%s)", spec.FullText(), spec.FailureMessage())
			}
		}
	}
	for i, n := range used {
		if kinds := concerned(selected, skips[i].ground); n < kinds {
			t.Errorf("skip %q accounts for %d specs of %d kinds: remove or narrow it", skips[i].spec, n, kinds)
		}
	}
	if passed == 0 {
		t.Error("no spec ran")
	}
	t.Logf("%d specs passed", passed)
}

func rowFor(spec types.SpecReport) int {
	return slices.IndexFunc(skips, func(s skip) bool {
		return s.spec.MatchString(spec.FullText()) && strings.HasPrefix(spec.FullText(), s.ground)
	})
}

// concerned counts the kinds that a row is about.
func concerned(selected []kind, ground string) int {
	n := 0
	for _, k := range selected {
		if strings.HasPrefix(k.ground, ground) {
			n++
		}
	}
	return n
}
