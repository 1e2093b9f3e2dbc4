//go:build vm

package crash

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

func newProjectHost(t *testing.T, fsType string) *host {
	t.Helper()
	return newHostIn(t, filepath.Join(testenv.ProjectQuotas(t, fsType, poolFilesystem), "pool"), crashing, "")
}

// TestProject is TestAgain, TestInstead and TestRandomMoments for directories that project
// quotas limit. A row that makes the call again on one filesystem undoes it on the other.
func TestProject(t *testing.T) {
	for i, fsType := range []string{"xfs", "ext4"} {
		t.Run(fsType, func(t *testing.T) {
			newProjectHost(t, fsType).randomMoments(t, local, local, local)
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
						r.run(t, newProjectHost(t, fsType), local, after)
					})
				}
			}
		})
	}
}
