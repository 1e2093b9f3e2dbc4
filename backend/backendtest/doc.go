// Package backendtest is the conformance suite. It checks what users rely on and csi-sanity
// does not check. It drives a whole driver over its socket, as an orchestrator does, on real
// devices and mounts.
//
// The suite is one table (table.go). A row has a name, the powers that it needs, and a test.
// A [Target] describes a backend on a medium, and states the powers of its kinds of volume.
// Each kind gets every row whose powers it has.
//
// To test a new kind, describe it and run it:
//
//	func TestMain(m *testing.M) { backendtest.Main(m, example.Kind) }
//
//	func TestConformance(t *testing.T) {
//		backendtest.Run(t, backendtest.Target{
//			Name: "example", Backend: example.Kind, Pool: backendtest.DefaultPool,
//			Class:  map[string]string{"backend": example.Kind.Name},
//			Powers: backendtest.NodeLocal | backendtest.Divisible | backendtest.Expand,
//			Kinds:  backendtest.Directories(), // or Devices("ext4", "xfs")
//			Medium: backendtest.OnFilesystem(backendtest.Formatted("xfs")),
//		})
//	}
//
// Run fails if the backend implements an optional interface whose power no kind states, or
// the reverse. Target.Advertised lists the first, Target.Except gives a reason for each row
// that does not hold. An entry in package targets instead of a literal gives the kind to
// csi-sanity (test/sanity) and verification (test/verify) as well.
package backendtest
