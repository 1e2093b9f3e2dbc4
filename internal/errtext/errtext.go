// Package errtext reduces errors to comparable texts, so that a log does not repeat an error.
package errtext

import (
	"strings"
	"unicode"
)

// Kind returns the text of an error without digits, "" for nil. Errors that differ only in a time, a port or
// a count have the same kind.
func Kind(err error) string {
	if err == nil {
		return ""
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsDigit(r) {
			return -1
		}
		return r
	}, err.Error())
}
