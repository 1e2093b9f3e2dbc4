//go:build vm

package crash

import (
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestProject is about the directories of TestAgain, TestInstead and TestRandomMoments,
// where project quotas limit them. Where one filesystem has the call made again, the other
// goes the other way.
func TestProject(t *testing.T) {
	for i, fsType := range []string{"xfs", "ext4"} {
		t.Run(fsType, func(t *testing.T) {
			newHostOn(t, testenv.ProjectQuotas(t, fsType, "4G"), crashing, "").randomMoments(t, local, local, local)
			for j, r := range allRows() {
				if !slices.Contains(r.kinds, local) {
					continue
				}
				r.used = r.used || r.call == cut // it is copied, and has no snapshots while it is in use
				how, after := "again", callAgain
				if (i+j)%2 == 1 {
					how, after = "instead", goBack
				}
				if name := r.name(local) + "/" + how; strings.Contains(name, *only) {
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						r.run(t, newHostOn(t, testenv.ProjectQuotas(t, fsType, "4G"), crashing, ""), local, after)
					})
				}
			}
		})
	}
}
