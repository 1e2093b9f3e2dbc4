package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/test/sixthkind"
)

// binary is the path of a driver that serves all kinds, including the kind of package sixthkind.
var binary string

func TestMain(m *testing.M) {
	// The benchmark starts /proc/self/exe, which is this test binary, as a floor.
	if len(os.Args) > 1 && os.Args[1] == argFloor {
		if err := serveFloor(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testenv.Main(testenv.WithProgram{M: m, Root: true, Path: &binary, Build: sixthkind.Build})
}

// TestTargets measures one volume of each kind of each target that does not need a virtual machine. It
// checks that the output has a section for each kind.
func TestTargets(t *testing.T) {
	testenv.RequireRoot(t)
	for _, target := range targets.All {
		if target.Guest {
			continue
		}
		t.Run(target.Name, func(t *testing.T) {
			var out bytes.Buffer
			o := options{binary: binary, volumes: 1, rounds: 1, target: target.Name}
			for _, p := range o.parts() {
				if err := p.run(t.Context(), o, &out); err != nil {
					t.Fatal(err)
				}
			}
			for _, k := range target.Volumes() {
				if title := "### " + target.Name + " " + k.Name() + "\n"; !strings.Contains(out.String(), title) {
					t.Errorf("the output has no section %q:\n%s", title, &out)
				}
			}
		})
	}
}
