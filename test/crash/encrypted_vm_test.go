//go:build vm

package crash

import (
	"strings"
	"testing"
)

// TestEncrypted kills the driver at crash points and at random moments, for encrypted images. A program that the driver has
// started is killed with it. Half of the rows repeat the interrupted call, and the others undo it.
func TestEncrypted(t *testing.T) {
	t.Run("random", func(t *testing.T) {
		encryptedExt4[0].host(t, "").randomMoments(t, encryptedExt4[0], encryptedRaw[0], encryptedExt4[0])
	})
	t.Run("rows", func(t *testing.T) {
		for i, r := range encryptedRows {
			for j, k := range r.kinds {
				how, after := "retry", retryCall
				if (i+j)%2 == 1 {
					how, after = "undo", undoCall
				}
				if name := r.name(k) + "/" + how; strings.Contains(name, *only) {
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						r.run(t, k.host(t, ""), k, after)
					})
				}
			}
		}
	})
}
