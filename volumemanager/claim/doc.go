// Package claim binds, provisions, expands and reclaims the volumes of claims. It does for one
// machine what kube-controller-manager, external-provisioner and external-resizer do for a
// cluster.
//
// Each decision is written to the store before it is executed or reported, in an order from
// which a restart continues. A claim is recorded as Pending before its volume is created, and
// the volume is recorded before the claim is Bound. A volume is recorded as Released before its
// claim is removed, and is removed after its data is deleted. So Sync decides from manifests and
// store alone, and each operation checks the records again before it writes.
//
// A UID identifies a claim. It is derived from the name unless the manifest sets it, so a claim
// that is added again gets its volume back, unless deletion of the volume has begun. A retained
// volume is bound to another claim if its manifest names that claim in spec.claimRef. A volume of
// a manifest is available to any claim after the manifest was removed and added again.
package claim
