package main

import (
	"strings"
	"testing"
)

// TestConfirm: only the answer yes confirms a recovery. A program without input must use --yes.
func TestConfirm(t *testing.T) {
	for answer, want := range map[string]bool{"yes\n": true, "yes": true, "  yes\n": true, "": false, "\n": false, "y\n": false, "no\nyes\n": false} {
		if err := confirm(strings.NewReader(answer), func(string, ...any) {}); (err == nil) != want {
			t.Errorf("%q: got %v, want confirmed: %t", answer, err, want)
		}
	}
}
