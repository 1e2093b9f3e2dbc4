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
			limited := limited[0]
			newProjectHost(t, fsType).randomMoments(t, limited, limited, limited)
			for j, r := range allRows() {
				if !slices.ContainsFunc(r.kinds, func(k kind) bool { return k.name == limited.name }) {
					continue
				}
				r.used = r.used || r.call == cut // these directories are copied only while they are not in use
				how, after := "again", callAgain
				if (i+j)%2 == 1 {
					how, after = "instead", callInstead
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
