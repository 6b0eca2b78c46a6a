"""What passes of several families know about fragments and do to them; `mpmd.ir` is all this builds on."""
