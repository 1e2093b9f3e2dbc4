//go:build vm

package crash

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// newProjectHost starts a driver whose pool is on a new filesystem with project quotas.
func newProjectHost(t *testing.T, fsType string) *host {
	t.Helper()
	return newHostWithPool(t, filepath.Join(testenv.ProjectQuotas(t, fsType, poolFilesystem), "pool"), crashing, "")
}

// TestProject kills the driver at each crash point and at random moments, for directories that project
// quotas limit. A row that repeats the interrupted call on one filesystem undoes it on the other.
func TestProject(t *testing.T) {
	for i, fsType := range []string{"xfs", "ext4"} {
		t.Run(fsType, func(t *testing.T) {
			limited := limited[0]
			newProjectHost(t, fsType).randomMoments(t, limited, limited, limited)
			for j, r := range allRows() {
				if !slices.ContainsFunc(r.kinds, func(k kind) bool { return k.name == limited.name }) {
					continue
				}
				r.used = r.used || r.call == snapshot // snapshots of these directories can only be taken while they are not in use
				how, after := "retry", retryCall
				if (i+j)%2 == 1 {
					how, after = "undo", undoCall
				}
				if name := r.name(limited) + "/" + how; strings.Contains(name, *only) {
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						r.run(t, newProjectHost(t, fsType), limited, after)
					})
				}
			}
		})
	}
}
